#include "runtime/pipeline/output_gather.hpp"

#include <cstdint>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/data/sample_specs.hpp"

namespace sluice {
std::span<const EdgeTensor> OutputGather::specs() const {
  return layout_.wires.edges.inputs(layout_.wires.edges.largest(), layout_.plans.num_stages());
}

void OutputGather::require_samples() const {
  const std::int64_t samples = layout_.wires.edges.largest();
  const auto outputs = specs();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const TensorSpec& spec = outputs[i].spec;
    if (spec.shape.rank() > 0 && spec.shape[0] > 0 && spec.shape[0] % samples == 0) continue;
    throw_usage(
        "infer(): output {} of the last stage is {} for a micro-batch of {} samples; legal is a "
        "first dimension with equally many rows for each sample",
        i, to_string(spec), samples);
  }
}

void OutputGather::begin() {
  const auto outputs = specs();
  for (std::vector<Output>* list : {&mine_, &all_}) {
    list->resize(outputs.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      (*list)[i].spec = with_samples(outputs[i].spec, 0);
      (*list)[i].bytes.clear();
    }
  }
  tensors_.clear();
}

void OutputGather::append(Output& to, const TensorSpec& spec, std::span<const std::byte> bytes) {
  if (with_samples(spec, 0) != with_samples(to.spec, 0)) {
    throw_usage("infer(): the last stage's outputs differ between micro-batches: {} and {}",
                to_string(spec), to_string(to.spec));
  }
  to.spec = with_samples(spec, to.spec.shape[0] + spec.shape[0]);
  to.bytes.insert(to.bytes.end(), bytes.begin(), bytes.end());
}

void OutputGather::add(std::span<const Tensor> outputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    append(mine_[i], outputs[i].spec, {outputs[i].as<const std::byte>(), outputs[i].spec.bytes()});
  }
  show();
}

void OutputGather::show() {
  tensors_.resize(mine_.size());
  for (std::size_t i = 0; i < mine_.size(); ++i) {
    tensors_[i] = {mine_[i].bytes.data(), mine_[i].spec};
  }
}

void OutputGather::gather_to(int rank) {
  Collectives& world = *job_.world.collectives;
  const Topology& topology = layout_.place.topology;
  const int me = job_.world.ranks->rank();
  std::vector<std::byte> received;
  for (int r = 0; r < topology.replicas; ++r) {
    const int maker = topology.rank_of(r, layout_.plans.last_rank());
    for (std::size_t i = 0; i < mine_.size(); ++i) {
      const Output& made = mine_[i];
      std::int64_t rows = made.spec.shape[0];
      if (me == maker && me == rank) {
        append(all_[i], made.spec, made.bytes);
      } else if (me == maker) {
        world.send(rank, object_bytes(rows));
        world.send(rank, made.bytes);
      } else if (me == rank) {
        world.recv(maker, object_bytes(rows));
        const TensorSpec spec = with_samples(made.spec, rows);
        received.resize(spec.bytes());
        world.recv(maker, received);
        append(all_[i], spec, received);
      }
    }
  }
  tensors_.clear();
  if (me != rank) return;
  std::swap(mine_, all_);
  show();
}

void OutputGather::gather_to_all() {
  gather_to(0);
  Collectives& world = *job_.world.collectives;
  if (job_.world.ranks->rank() != 0) begin();
  for (Output& output : mine_) {
    std::int64_t rows = output.spec.shape[0];
    world.broadcast(object_bytes(rows), 0);
    output.spec = with_samples(output.spec, rows);
    output.bytes.resize(output.spec.bytes());
    world.broadcast(output.bytes, 0);
  }
  show();
}

}  // namespace sluice
