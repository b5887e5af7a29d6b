// An MPI program of somebody else: it keeps its main, hands over its communicator, draws a schedule
// and trains two steps over all ranks. Ends with 0 if all of it worked.
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/mpi.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>
#include <sluice/transformer.hpp>

namespace {

// Token 1 after token 1.
class Ones : public sluice::DataSource {
 public:
  explicit Ones(std::int64_t context) : context_(context) {}
  std::vector<sluice::TensorSpec> input_specs(std::int64_t samples) const override {
    return {{sluice::DType::kI32, {samples, context_}}};
  }
  std::vector<sluice::TensorSpec> target_specs(std::int64_t samples) const override {
    return input_specs(samples);
  }
  void inputs(sluice::Phase, std::uint64_t, sluice::SampleRange,
              std::span<const sluice::Tensor> into) const override {
    std::fill_n(into[0].as<std::int32_t>(), into[0].elements(), 1);
  }
  void targets(sluice::Phase phase, std::uint64_t step, sluice::SampleRange range,
               std::span<const sluice::Tensor> into) const override {
    inputs(phase, step, range, into);
  }

 private:
  std::int64_t context_;
};

bool train(sluice::World& world) {
  const sluice::TransformerConfig model{
      .layers = 4, .heads = 1, .width = 8, .context = 4, .vocabulary = 8};
  const Ones data(model.context);
  sluice::PipelineOptions options;
  options.shape.micro_batches = 2;
  sluice::Pipeline pipeline(world, sluice::Transformer(model), data, options);
  const double first = pipeline.train_step().loss;
  return pipeline.train_step().loss < first && pipeline.step() == 2;
}

}  // namespace

int main(int argc, char** argv) {
  int granted = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &granted);
  bool right = false;
  {
    const std::unique_ptr<sluice::World> world = sluice::make_world(MPI_COMM_WORLD);
    const sluice::Schedule schedule = sluice::generate("gpipe", {.ranks = 2, .micro_batches = 4});
    std::printf("%s", sluice::draw_grid(schedule).c_str());
    right = !sluice::check(schedule) && train(*world);
  }
  MPI_Finalize();
  return right ? 0 : 1;
}
