#include "tests/stages/transformer/reference_transformer.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>

namespace sluice::testing {

namespace {

using Vector = std::vector<double>;

size_t index(int i) { return static_cast<size_t>(i); }

// One sample's forward; every matrix is [sequence, columns].
class Reference {
 public:
  Reference(const TransformerConfig& config, const ReferenceParameters& parameters, int sequence)
      : config_(config), parameters_(parameters), sequence_(sequence), width_(config.width) {
    gpt2_ = config.kind == TransformerKind::kGpt2;
    kv_heads_ = gpt2_ || config.kv_heads == 0 ? config.heads : config.kv_heads;
    head_dim_ = config.head_dim > 0 ? config.head_dim : config.width / config.heads;
  }

  double loss(const std::int32_t* tokens, const std::int32_t* targets) const {
    Vector x = embed(tokens);
    for (int layer = 0; layer < config_.layers; ++layer) {
      const std::string name = "blocks." + std::to_string(layer);
      add_to(x, linear(attend(linear(norm(x, name + ".norm1"), name + ".attention.qkv"), layer),
                       name + ".attention.output"));
      add_to(x, linear(activate(linear(norm(x, name + ".norm2"),
                                       name + (gpt2_ ? ".mlp.up" : ".mlp.gate_up"))),
                       name + ".mlp.down"));
    }
    return cross_entropy(linear(norm(x, "final_norm"), config_.tied ? "token_embedding" : "head"),
                         targets);
  }

 private:
  const Vector& parameter(const std::string& name) const { return parameters_.at(name); }
  double epsilon() const { return static_cast<double>(config_.norm_epsilon); }
  bool has(const std::string& name) const { return parameters_.count(name) > 0; }
  static void add_to(Vector& x, const Vector& y) {
    std::transform(x.begin(), x.end(), y.begin(), x.begin(), std::plus<>());
  }

  Vector embed(const std::int32_t* tokens) const {
    const Vector& table = parameter("token_embedding.weight");
    const Vector none(index(sequence_ * width_));
    const Vector& positions = gpt2_ ? parameter("position_embedding.weight") : none;
    Vector x(index(sequence_ * width_));
    for (int t = 0; t < sequence_; ++t) {
      for (int i = 0; i < width_; ++i) {
        x[index(t * width_ + i)] =
            table[index(tokens[t] * width_ + i)] + positions[index(t * width_ + i)];
      }
    }
    return x;
  }

  Vector norm(const Vector& x, const std::string& name) const {
    const Vector& weight = parameter(name + ".weight");
    const Vector none(weight.size());
    const Vector& bias = gpt2_ ? parameter(name + ".bias") : none;
    Vector y(x.size());
    for (int t = 0; t < sequence_; ++t) {
      const double* row = x.data() + t * width_;
      double mean = 0, squares = 0;
      for (int i = 0; gpt2_ && i < width_; ++i) {
        mean += row[i] / width_;
      }
      for (int i = 0; i < width_; ++i) {
        squares += (row[i] - mean) * (row[i] - mean) / width_;
      }
      const double scale = 1.0 / std::sqrt(squares + epsilon());
      for (int i = 0; i < width_; ++i) {
        y[index(t * width_ + i)] = (row[i] - mean) * scale * weight[index(i)] + bias[index(i)];
      }
    }
    return y;
  }

  Vector linear(const Vector& x, const std::string& name) const {
    const Vector& weight = parameter(name + ".weight");
    const int in = static_cast<int>(x.size()) / sequence_;
    const int out = static_cast<int>(weight.size()) / in;
    const Vector none(index(out));
    const Vector& bias = has(name + ".bias") ? parameter(name + ".bias") : none;
    Vector y(index(sequence_ * out));
    for (int t = 0; t < sequence_; ++t) {
      for (int o = 0; o < out; ++o) {
        double sum = bias[index(o)];
        for (int i = 0; i < in; ++i) {
          sum += x[index(t * in + i)] * weight[index(o * in + i)];
        }
        y[index(t * out + o)] = sum;
      }
    }
    return y;
  }

  // theta_i, scaled as modeling_rope_utils.py of transformers writes it, in wavelengths.
  double frequency(int i) const {
    const double plain = std::pow(static_cast<double>(config_.rotary_base), -2.0 * i / head_dim_);
    const RotaryScaling& scaling = config_.rotary_scaling;
    if (scaling.kind == RotaryScaling::Kind::kNone) return plain;
    if (scaling.kind == RotaryScaling::Kind::kLinear) return plain / scaling.factor;
    const double wavelength = 2 * std::numbers::pi / plain, context = scaling.original_context;
    const double low = scaling.low_frequency_factor, high = scaling.high_frequency_factor;
    if (wavelength < context / high) return plain;
    if (wavelength > context / low) return plain / scaling.factor;
    const double smooth = (context / wavelength - low) / (high - low);
    return (1 - smooth) * plain / scaling.factor + smooth * plain;
  }

  void norm_head(Vector& x, const std::string& name) const {
    double squares = 0;
    for (const double value : x) squares += value * value / head_dim_;
    const Vector& weight = parameter(name);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= weight[i] / std::sqrt(squares + epsilon());
  }

  // The vector of `head` (queries, then keys, then values) at position t, normed and rotated where
  // it is a query or a key.
  Vector head_vector(const Vector& qkv, int t, int head, int layer) const {
    const int packed = (config_.heads + 2 * kv_heads_) * head_dim_;
    const double* from = qkv.data() + t * packed + head * head_dim_;
    Vector result(from, from + head_dim_);
    if (config_.qk_norm && head < config_.heads + kv_heads_) {
      norm_head(result, "blocks." + std::to_string(layer) + ".attention." +
                            (head < config_.heads ? "query" : "key") + "_norm.weight");
    }
    if (!gpt2_ && head < config_.heads + kv_heads_) {
      const int half = head_dim_ / 2;
      for (int i = 0; i < half; ++i) {
        const double angle = t * frequency(i);
        const double low = result[index(i)], high = result[index(i + half)];
        result[index(i)] = low * std::cos(angle) - high * std::sin(angle);
        result[index(i + half)] = high * std::cos(angle) + low * std::sin(angle);
      }
    }
    return result;
  }

  // The first position that a query at position t sees.
  int first_seen(int t, int layer) const {
    const std::vector<int>& full = config_.full_layers;
    const bool all =
        config_.window == 0 || std::find(full.begin(), full.end(), layer) != full.end();
    return all ? 0 : std::max(0, t - config_.window + 1);
  }

  Vector attend(const Vector& qkv, int layer) const {
    const int columns = config_.heads * head_dim_;
    Vector out(index(sequence_ * columns));
    for (int head = 0; head < config_.heads; ++head) {
      const int kv = head / (config_.heads / kv_heads_);
      std::vector<Vector> keys, values;
      for (int t = 0; t < sequence_; ++t) {
        keys.push_back(head_vector(qkv, t, config_.heads + kv, layer));
        values.push_back(head_vector(qkv, t, config_.heads + kv_heads_ + kv, layer));
        const auto first = static_cast<std::size_t>(first_seen(t, layer));
        mix(head_vector(qkv, t, head, layer), std::span(keys).subspan(first),
            std::span(values).subspan(first), out.data() + t * columns + head * head_dim_);
      }
    }
    return out;
  }

  void mix(const Vector& query, std::span<const Vector> keys, std::span<const Vector> values,
           double* out) const {
    Vector weights;
    double total = 0;
    for (const Vector& key : keys) {
      double score = 0;
      for (int i = 0; i < head_dim_; ++i) {
        score += query[index(i)] * key[index(i)];
      }
      weights.push_back(std::exp(score / std::sqrt(head_dim_)));
      total += weights.back();
    }
    for (size_t s = 0; s < values.size(); ++s) {
      for (int i = 0; i < head_dim_; ++i) {
        out[i] += weights[s] / total * values[s][index(i)];
      }
    }
  }

  Vector activate(const Vector& x) const {
    if (gpt2_) {
      Vector y(x.size());
      std::transform(x.begin(), x.end(), y.begin(), [](double v) {
        return 0.5 * v *
               (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
      });
      return y;
    }
    const int hidden = static_cast<int>(x.size()) / sequence_ / 2;
    Vector y(index(sequence_ * hidden));
    for (int t = 0; t < sequence_; ++t) {
      for (int i = 0; i < hidden; ++i) {
        const double gate = x[index(t * 2 * hidden + i)];
        const double up = x[index(t * 2 * hidden + hidden + i)];
        y[index(t * hidden + i)] = gate / (1 + std::exp(-gate)) * up;
      }
    }
    return y;
  }

  double cross_entropy(const Vector& logits, const std::int32_t* targets) const {
    double loss = 0;
    for (int t = 0; t < sequence_; ++t) {
      if (targets[t] < 0) {
        continue;
      }
      const double* row = logits.data() + t * config_.vocabulary;
      double total = 0;
      for (int i = 0; i < config_.vocabulary; ++i) {
        total += std::exp(row[i]);
      }
      loss += std::log(total) - row[targets[t]];
    }
    return loss;
  }

  const TransformerConfig& config_;
  const ReferenceParameters& parameters_;
  int sequence_, width_;
  bool gpt2_ = true;
  int kv_heads_ = 1, head_dim_ = 1;
};

}  // namespace

double reference_loss(const TransformerConfig& config, const ReferenceParameters& parameters,
                      const std::vector<std::int32_t>& tokens,
                      const std::vector<std::int32_t>& targets, int samples, int sequence) {
  const Reference reference(config, parameters, sequence);
  double loss = 0;
  for (int sample = 0; sample < samples; ++sample) {
    loss += reference.loss(tokens.data() + sample * sequence, targets.data() + sample * sequence);
  }
  return loss;
}

}  // namespace sluice::testing
