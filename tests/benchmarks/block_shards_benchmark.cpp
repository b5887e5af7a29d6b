// What shards cost one rank: a transformer's block forward and backward by 4 and by 8 shards, in
// turn with one shard, on one CPU thread.
//   block_shards_benchmark [--json FILE] [--rounds N] [--rows N] [--threads N] [--precision
//   f32|bf16]
//                          [--width 768|2048]
#include <fmt/core.h>

#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include <sluice/transformer.hpp>

#include "stages/network/state_bytes.hpp"
#include "tests/benchmarks/benchmark_report.hpp"

namespace sluice::benchmarks {
namespace {

// A stage of one block, with a micro-batch of one sample.
class Block {
 public:
  Block(const TransformerConfig& config, int shards, int threads)
      : compute_({}, threads),
        stage_(Transformer(config).stage_of({{0, 1, 2, 3}}, 1, {shards, 0, shards})),
        edge_{config.stream_precision, {1, config.context, config.width}} {
    const StageDescription described = stage_->describe({&edge_, 1}, compute_);
    const StateBytes bytes{described.state_bytes_until_input, described.state_bytes_until_weight};
    state_ = Buffer({}, bytes.slot());
    edges_ = Buffer({}, 4 * edge_.bytes());
    for (std::size_t i = 0; i < edges_.size() / sizeof(Bf16); ++i) {  // small numbers in both types
      reinterpret_cast<Bf16*>(edges_.data())[i] = to_bf16(static_cast<float>(i * 7 % 13) - 6.5F);
    }
    stage_->parameters()->allocate(compute_.memory(), 1, true);
    stage_->prepare({.compute = &compute_,
                     .state = bytes.cut(state_.data(), 0),
                     .split_backward = false,
                     .input_sizes = {{edge_}}});
    context_.state = bytes.cut(state_.data(), 0);
  }

  // CPU time of a forward and a backward.
  double seconds() {
    const std::clock_t start = std::clock();
    const Tensor x = edge(0), y = edge(1), dy = edge(2), dx = edge(3);
    context_.inputs = {&x, 1};
    stage_->begin_step(compute_);
    stage_->forward(context_, {&x, 1}, {&y, 1});
    stage_->backward(context_, {&dy, 1}, {&dx, 1});
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  }

 private:
  Tensor edge(std::size_t i) { return {edges_.data() + i * edge_.bytes(), edge_}; }

  ComputeContext compute_;
  std::unique_ptr<Stage> stage_;
  TensorSpec edge_;
  Buffer state_, edges_;
  StageContext context_{.compute = compute_, .stage = 1, .samples = 1};
};

void measure(const TransformerConfig& config, const char* kind, int rounds, int threads,
             Report& report) {
  constexpr int kShards[] = {1, 4, 8};
  std::vector<std::unique_ptr<Block>> blocks;
  for (const int shards : kShards) {
    blocks.push_back(std::make_unique<Block>(config, shards, threads));
  }
  std::vector<std::vector<double>> seconds(blocks.size());
  for (int round = -2; round < rounds; ++round) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const double took = blocks[i]->seconds();
      if (round >= 0) seconds[i].push_back(took);
    }
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    std::vector<double> more;  // than one shard of the same round
    for (std::size_t round = 0; round < seconds[i].size(); ++round) {
      more.push_back(100 * (seconds[i][round] / seconds[0][round] - 1));
    }
    report.row({kind, config.width, kShards[i], 1e3 * median(seconds[i]), median(more)});
  }
}

int run(int argc, char** argv) {
  const int rounds = std::atoi(argument(argc, argv, "--rounds", "15").c_str());
  const int threads = std::atoi(argument(argc, argv, "--threads", "1").c_str());
  Report report("shards of a transformer's block",
                {"block", "width", "shards", "CPU ms", "more %"});
  for (const TransformerKind kind : {TransformerKind::kGpt2, TransformerKind::kLlama}) {
    for (const int width : {768, 2048}) {
      if (std::atoi(argument(argc, argv, "--width", std::to_string(width)).c_str()) != width)
        continue;
      const TransformerConfig config{
          .kind = kind,
          .layers = 1,
          .heads = width / 64,
          .width = width,
          .context = std::atoi(argument(argc, argv, "--rows", "512").c_str()),
          .vocabulary = 64,
          .precision =
              argument(argc, argv, "--precision", "f32") == "bf16" ? DType::kBf16 : DType::kF32};
      measure(config, kind == TransformerKind::kGpt2 ? "gpt2" : "llama", rounds, threads, report);
    }
  }
  report.print();
  report.save(argument(argc, argv, "--json", ""));
  return 0;
}

}  // namespace
}  // namespace sluice::benchmarks

int main(int argc, char** argv) { return sluice::benchmarks::run(argc, argv); }
