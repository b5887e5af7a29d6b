// A layer of a program's own.
#pragma once

#include <cstdint>
#include <string>

#include <sluice/layers.hpp>

namespace sluice::testing {

// y = x * weight, with one weight. Adds to its gradient.
class Scale : public nn::Layer {
 public:
  explicit Scale(double start) : start_(start) {}
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    weight_ = &set.add(name + "weight", {1}, Init::constant(start_));
  }
  void forward(nn::LayerCall& call, const Tensor& y) override {
    for (std::int64_t i = 0; i < y.elements(); ++i) y.at(i) = call.x.at(i) * weight_->value.at(0);
  }
  void backward_input(nn::LayerCall& /*call*/, const Tensor& dy, const Tensor& dx) override {
    for (std::int64_t i = 0; i < dy.elements(); ++i) dx.at(i) = dy.at(i) * weight_->value.at(0);
  }
  void backward_weight(nn::LayerCall& call, const Tensor& dy) override {
    for (std::int64_t i = 0; i < dy.elements(); ++i) weight_->grad.at(0) += dy.at(i) * call.x.at(i);
  }

 private:
  double start_;
  Parameter* weight_ = nullptr;
};

}  // namespace sluice::testing
