// How the virtual replicas of a training (PipelineOptions::Shape::virtual_replicas) are divided
// among its replicas. Each computes consecutive ones, whose gradients are a subtree of the sum over
// all of them: for one replica any number, else a power of two.
#pragma once

#include <string>
#include <vector>

namespace sluice {

// Whether that is so for each of `replicas`. 0 virtual replicas: as many as replicas.
[[nodiscard]] bool can_divide(int virtual_replicas, int replicas);

// The replicas that can divide so many virtual ones, ascending. Requires: virtual_replicas >= 1.
[[nodiscard]] std::vector<int> dividing(int virtual_replicas);

// The legal numbers of virtual replicas near this one, in words. Requires: replicas >= 1.
[[nodiscard]] std::string legal_virtual_replicas(int virtual_replicas, int replicas);

// How many virtual replicas each of `replicas` computes. Throws Error(kUsage) that names the
// nearest legal numbers where can_divide() is false. Requires: replicas >= 1.
[[nodiscard]] int shares_of(int virtual_replicas, int replicas);

}  // namespace sluice
