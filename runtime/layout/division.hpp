// How what the bits of a training depend on is divided among ranks: its virtual replicas
// (PipelineOptions::Shape::virtual_replicas) among replicas, the shards of its model
// (tensor_shards) among the ranks that share a stage. Each has equally many consecutive parts,
// whose sum is a subtree of the sum over all of them: for one holder any number, else a power of
// two.
#pragma once

#include <string>
#include <vector>

namespace sluice {

struct DivisionNames {
  const char* parts;
  const char* holder;  // of parts
  const char* option;  // of programs, for the number of parts
};
inline constexpr DivisionNames kVirtualReplicas = {"virtual replicas", "replica",
                                                   "virtual-replicas"};
inline constexpr DivisionNames kTensorShards = {"tensor shards", "tensor rank", "tensor-shards"};

// More only cost memory and time.
inline constexpr int kMostTensorShards = 4096;

// Whether that is so for each of `holders`. 0 parts: as many as holders.
[[nodiscard]] bool can_divide(int parts, int holders);

// The numbers of holders that can divide so many parts, ascending. Requires: parts >= 1.
[[nodiscard]] std::vector<int> dividing(int parts);

// The legal numbers of parts near this one, in words. Requires: holders >= 1.
[[nodiscard]] std::string legal_parts(int parts, int holders, const DivisionNames& names);

// How many parts each of `holders` computes. Throws Error(kUsage) that names the nearest legal
// numbers where can_divide() is false. Requires: holders >= 1.
[[nodiscard]] int shares_of(int parts, int holders, const DivisionNames& names);

}  // namespace sluice
