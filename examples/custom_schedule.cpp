// A schedule of your own: written as a function, checked, drawn and simulated next to 1F1B, then
// trained with. Waves: p forwards, then their p backwards, and the next p: never more than p
// micro-batches in flight, for a bubble after every wave.   mpirun -n 2 custom_schedule FILE
#include <algorithm>
#include <cstdio>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>
#include <sluice/transformer.hpp>
using namespace sluice;

Schedule waves(int ranks, int micro_batches) {
  Schedule schedule = empty_schedule("waves", Placement::linear(ranks), micro_batches);
  for (int stage = 0; stage < ranks; ++stage) {
    for (int first = 0; first < micro_batches; first += ranks) {
      const int end = std::min(first + ranks, micro_batches);
      for (int i = first; i < end; ++i) append(schedule, ActionKind::kForward, stage, i);
      for (int i = first; i < end; ++i) append(schedule, ActionKind::kBackward, stage, i);
    }
  }
  return schedule;
}

void judge(const Schedule& schedule) {
  if (const auto offence = check(schedule)) {
    throw Error(ErrorCode::kPlan, describe(schedule, *offence));
  }
  const Simulation result = simulate(schedule, {.stages = {{.backward_input = 1}}});
  std::printf("%s: makespan %g, bubble %.3f, in flight %d\n%s\n", schedule.name.c_str(),
              result.makespan, result.bubble_makespan, result.peak_in_flight[0],
              draw_grid(schedule).c_str());
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [&](World& world) {
    if (argc != 2) throw Error(ErrorCode::kUsage, "usage: custom_schedule FILE (any text)");
    const auto order = std::make_shared<const Schedule>(waves(world.size(), 5));
    if (world.rank() == 0) judge(*order);
    if (world.rank() == 0) judge(generate("1f1b", {world.size(), order->micro_batches}));
    const Transformer model({.layers = 2, .heads = 2, .width = 32, .context = 32});
    const auto text = make_token_dataset(std::make_shared<TokenFile>(argv[1]), 32, 256);
    PipelineOptions options;
    options.shape.micro_batches = order->micro_batches;  // of one window each
    options.order.given = order;
    Pipeline pipeline(world, model, text->spec(), options);
    DataLoader loader = pipeline.loader(text, {.batch_size = 5, .shuffle = true});
    double loss = 0;
    for (int step = 0; step < 3; ++step) loss = pipeline.train_step(*loader.next()).loss;
    if (world.rank() == 0) std::printf("loss after three steps: %.17g\n", loss);
  });
}
