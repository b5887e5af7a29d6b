// Where the parameters of a rank lie in memory where each replica has a part of them at rest: a
// function of the layout alone.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "comm/device/partial_memory.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

// The values and the bf16 copies of all of the rank's stages, in one PartialMemory. Its ranges are
// what the replica does not have at rest. On a GPU units share their memory where they are gathered
// for each use: those of even numbers (in order of stages) that of one, and those of odd numbers
// that of another. Values of parameters with a copy are there one parameter at a time: all share
// memory.
struct ShardedMemory {
  struct Place {
    int stage;
    std::size_t values, copies;  // where they begin, in bytes
  };
  std::vector<Place> places;  // in order of the rank's stages
  std::size_t bytes = 0;
  std::vector<PartialMemory::Range> ranges;

  // Of a pipeline rank of this layout, as `replica`.
  ShardedMemory(const JobLayout& layout, int rank, int replica);
  // Whether these units share memory, by their numbers.
  [[nodiscard]] static bool share_slots(Gather gather, std::size_t unit, std::size_t other) {
    return gather == Gather::kPerUse && unit % 2 == other % 2;
  }
};

// The gradients of a GPU's rank where each micro-batch has its own sums over replicas
// (ParameterTable::sums_each_micro_batch): of all its stages, in one PartialMemory. Its ranges are
// the other replicas' parts. Units of a stage of even numbers share the memory of one, and those of
// odd numbers that of another.
struct GradientMemory {
  std::vector<std::pair<int, std::size_t>> places;  // a stage, and where its gradients begin
  std::size_t bytes = 0;
  std::vector<PartialMemory::Range> ranges;

  // Of a pipeline rank of this layout, as `replica`.
  GradientMemory(const JobLayout& layout, int rank, int replica);
};

}  // namespace sluice
