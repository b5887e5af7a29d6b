#include "tests/benchmarks/check_costs.hpp"

#include <time.h>

#include <vector>

#include <sluice/operators.hpp>

#include "stages/operators/operand_checks.hpp"

namespace sluice::benchmarks {

namespace {

constexpr int kCalls = 20000;

template <typename Body>
double nanoseconds_of(const Body& body) {
  const auto now = [] {
    timespec time = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  for (int i = 0; i < kCalls; ++i) body();
  return (now() - start) / kCalls;
}

// A layer of `in` to `out` columns with ReLU and a squared error, on `rows` rows.
class SmallLayer {
 public:
  SmallLayer(std::int64_t rows, std::int64_t in, std::int64_t out)
      : x_(make({rows, in})),
        y_(make({rows, out})),
        targets_(make({rows, out})),
        weight_(make({out, in})),
        bias_(make({out})),
        dx_(make({rows, in})),
        dweight_(make({out, in})),
        dbias_(make({out})) {}

  void forward(ComputeContext& ctx) { linear_forward(ctx, x_, weight_, bias_, y_); }
  void check_forward() { operands::linear_forward("linear_forward", x_, weight_, bias_, y_); }

  void activate(ComputeContext& ctx) { relu_forward(ctx, y_, y_); }
  void check_activate() { operands::elementwise("relu_forward", y_, y_); }

  void step(ComputeContext& ctx) {
    double sum = 0;
    forward(ctx);
    activate(ctx);
    mean_squared_error(ctx, y_, targets_, 1e-3, true, &sum);
    relu_backward(ctx, y_, y_, y_);
    linear_backward_input(ctx, y_, weight_, dx_);
    linear_backward_weight(ctx, x_, y_, dweight_, dbias_);
  }
  void check_step() {
    double sum = 0;
    check_forward();
    check_activate();
    operands::mean_squared_error("mean_squared_error", y_, targets_, &sum);
    operands::elementwise_backward("relu_backward", y_, y_, y_);
    operands::linear_backward_input("linear_backward_input", y_, weight_, dx_);
    operands::linear_backward_weight("linear_backward_weight", x_, y_, dweight_, dbias_);
  }

 private:
  Tensor make(const Shape& shape) {
    const TensorSpec spec = {DType::kF32, shape};
    buffers_.emplace_back(static_cast<std::size_t>(shape.elements()), 0.1F);
    return {buffers_.back().data(), spec};
  }

  std::vector<std::vector<float>> buffers_;
  Tensor x_, y_, targets_, weight_, bias_, dx_, dweight_, dbias_;
};

}  // namespace

Report check_costs(ComputeContext& ctx, int rounds) {
  Report report("Checks of operands beside the operators that make them",
                {"rows", "in", "out", "call", "checks ns", "with operators ns", "share"});
  struct Size {
    std::int64_t rows, in, out;
  };
  for (const auto& [rows, in, out] : {Size{2, 10, 16}, Size{16, 64, 64}}) {
    SmallLayer layer(rows, in, out);
    const auto row = [&, rows = rows, in = in, out = out](const char* call, const auto& checks,
                                                          const auto& operators) {
      std::vector<double> own, whole;
      for (int round = 0; round <= rounds; ++round) {
        const double of_checks = nanoseconds_of(checks), of_operators = nanoseconds_of(operators);
        if (round == 0) continue;  // warm-up
        own.push_back(of_checks);
        whole.push_back(of_operators);
      }
      report.row({rows, in, out, call, median(own), median(whole), median(own) / median(whole)});
    };
    row(
        "relu forward", [&] { layer.check_activate(); }, [&] { layer.activate(ctx); });
    row(
        "linear forward", [&] { layer.check_forward(); }, [&] { layer.forward(ctx); });
    row(
        "forward and backward, 6 operators", [&] { layer.check_step(); }, [&] { layer.step(ctx); });
  }
  return report;
}

}  // namespace sluice::benchmarks
