#include "tests/benchmarks/check_costs.hpp"

#include <time.h>

#include <vector>

#include <sluice/operators.hpp>

#include "stages/compute/backend.hpp"
#include "stages/compute/context_access.hpp"
#include "stages/compute/operator_table.hpp"

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

// The public operators by the names of a backend's table.
struct PublicOperators {
  decltype(&sluice::linear_forward) linear_forward = sluice::linear_forward;
  decltype(&sluice::pointwise_forward) pointwise_forward = sluice::pointwise_forward;
  decltype(&sluice::mean_squared_error) mean_squared_error = sluice::mean_squared_error;
  decltype(&sluice::pointwise_backward) pointwise_backward = sluice::pointwise_backward;
  decltype(&sluice::linear_backward_input) linear_backward_input = sluice::linear_backward_input;
  decltype(&sluice::linear_backward_weight) linear_backward_weight = sluice::linear_backward_weight;
};

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

  // `operators`: the public operators, or a backend's table of them, which checks nothing.
  void forward(const auto& operators, ComputeContext& ctx) {
    operators.linear_forward(ctx, x_, weight_, bias_, y_);
  }
  void activate(const auto& operators, ComputeContext& ctx) {
    operators.pointwise_forward(ctx, Pointwise::kRelu, y_, y_);
  }
  void step(const auto& operators, ComputeContext& ctx) {
    double sum = 0;
    forward(operators, ctx);
    activate(operators, ctx);
    operators.mean_squared_error(ctx, y_, targets_, 1e-3, true, &sum);
    operators.pointwise_backward(ctx, Pointwise::kRelu, y_, y_, y_);
    operators.linear_backward_input(ctx, y_, weight_, dx_);
    operators.linear_backward_weight(ctx, x_, y_, dweight_, dbias_, Write::kAdd);
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
  Report report("Checks of operands, and the operators with them",
                {"rows", "in", "out", "call", "checks ns", "with operators ns", "share"});
  struct Size {
    std::int64_t rows, in, out;
  };
  for (const auto& [rows, in, out] : {Size{2, 10, 16}, Size{16, 64, 64}}) {
    SmallLayer layer(rows, in, out);
    const auto row = [&, rows = rows, in = in, out = out](const char* name, const auto& call) {
      std::vector<double> checks, whole;
      for (int round = 0; round <= rounds; ++round) {
        const double without =
            nanoseconds_of([&] { call(ContextAccess::backend(ctx).operators()); });
        const double with = nanoseconds_of([&] { call(PublicOperators()); });
        if (round == 0) continue;  // warm-up
        checks.push_back(with - without);
        whole.push_back(with);
      }
      report.row(
          {rows, in, out, name, median(checks), median(whole), median(checks) / median(whole)});
    };
    row("relu forward", [&](const auto& operators) { layer.activate(operators, ctx); });
    row("linear forward", [&](const auto& operators) { layer.forward(operators, ctx); });
    row("forward and backward, 6 operators",
        [&](const auto& operators) { layer.step(operators, ctx); });
  }
  return report;
}

}  // namespace sluice::benchmarks
