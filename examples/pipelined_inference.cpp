// Requests pass a trained network one after the other: alone, each waits for the one before to
// leave the last stage; in a stream, every stage works on another one.   mpirun -n 2
// pipelined_inference
#include <chrono>
#include <cstdio>

#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
using namespace sluice;

int main(int argc, char** argv) {
  return run_main(argc, argv, [](World& world) {
    constexpr int kRequests = 200, kWidth = 512;
    std::vector<nn::LayerSpec> layers;
    for (int i = 0; i < 8; ++i) {
      layers.insert(layers.end(), {nn::linear(kWidth, kWidth), nn::gelu_tanh()});
    }
    // No training: no gradients, no optimizer. Several requests are in flight, one a micro-batch.
    PipelineOptions options{.shape = {.micro_batches = 16}, .training = {.inference = true}};
    const TensorSpec request{DType::kF32, {16, kWidth}};  // 16 rows each
    Pipeline pipeline(world, Sequential(layers).with_input(request), {.inputs = {request}},
                      options);
    std::vector<float> x(std::size_t(kRequests) * 16 * kWidth);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = float(i % 977) / 977 - 0.5F;
    const auto requests = [&](int first, int count) {
      const std::size_t size = 16 * kWidth;
      return view(std::span(x).subspan(std::size_t(first) * size, std::size_t(count) * size),
                  {count, 16, kWidth});
    };
    // Requests per second; every result goes to `use`, in order.
    std::vector<float> alone, streamed;
    const auto timed = [&](int at_once, std::vector<float>& first_number) {
      const auto begin = std::chrono::steady_clock::now();
      for (int first = 0; first < kRequests; first += at_once) {
        const Batch part{.inputs = {requests(first, at_once)}};
        (void)pipeline.infer(part,
                             {.on_outputs = [&](SampleRange samples, std::span<const Tensor> y) {
                               if (samples.first + first != std::int64_t(first_number.size()))
                                 std::abort();
                               first_number.push_back(y[0].at(0));
                             }});
      }
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      return kRequests / seconds.count();
    };
    double one = 0, stream = 0;
    for (int round = 0; round < 2; ++round) {  // the first round plans each kind of call
      alone.clear(), streamed.clear();
      one = timed(1, alone);
      stream = timed(kRequests, streamed);
    }
    if (world.rank() + 1 < world.size()) return;  // results are where the last stage is
    std::printf("%zu results in order, %s\n", streamed.size(),
                alone == streamed ? "the same both ways" : "DIFFERENT");
    std::printf("one at a time %.0f requests/s, in a stream %.0f requests/s: %.2f times\n", one,
                stream, stream / one);
  });
}
