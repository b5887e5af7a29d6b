// The tensors of each edge of a pipeline, and what carries them: known on every rank, and chosen
// with the reason, before anything is allocated, and refused where it cannot work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/error.hpp>
#include <sluice/options.hpp>
#include <sluice/schedule.hpp>
#include <sluice/stage.hpp>
#include <sluice/tensor.hpp>

#include "comm/group/communicator.hpp"
#include "runtime/layout/device_choice.hpp"

namespace sluice {

// A tensor of an edge. Its gradient has the same shape and dtype.
struct EdgeTensor {
  TensorSpec spec;
  bool wants_gradient = true;
};

// "2 samples", "2 samples of 8 positions".
[[nodiscard]] std::string to_string(UnitShape shape);

// The tensors of every edge, for every shape that a micro-batch may have.
class EdgeTable {
 public:
  EdgeTable() = default;
  // `sizes`: distinct shapes, the largest first. edges[size][s] are the inputs of stage s,
  // edges[size][stages] the outputs of the last stage. answers[size]: what infer() gives in their
  // place, or none; [size] may end early.
  EdgeTable(std::vector<UnitShape> sizes, std::vector<std::vector<std::vector<EdgeTensor>>> edges,
            std::vector<std::vector<TensorSpec>> answers = {})
      : sizes_(std::move(sizes)), edges_(std::move(edges)), answers_(std::move(answers)) {
    answers_.resize(sizes_.size());
  }

  // For another shape, within the largest. Spans of inputs() stay valid.
  void add(UnitShape shape, std::vector<std::vector<EdgeTensor>> edges,
           std::vector<TensorSpec> answers) {
    sizes_.push_back(shape);
    edges_.push_back(std::move(edges));
    answers_.push_back(std::move(answers));
  }
  [[nodiscard]] bool has(UnitShape shape) const {
    return std::find(sizes_.begin(), sizes_.end(), shape) != sizes_.end();
  }

  // Valid as long as the table. Throws Error(kInternal) for a shape that is not in sizes().
  [[nodiscard]] std::span<const EdgeTensor> inputs(UnitShape shape, int stage) const {
    return edges_[index_of(shape)][static_cast<std::size_t>(stage)];
  }
  // StageDescription::answers of the last stage; likewise.
  [[nodiscard]] std::span<const TensorSpec> answers(UnitShape shape) const {
    return answers_[index_of(shape)];
  }
  [[nodiscard]] UnitShape largest() const { return sizes_.front(); }
  [[nodiscard]] const std::vector<UnitShape>& sizes() const { return sizes_; }

 private:
  [[nodiscard]] std::size_t index_of(UnitShape shape) const {
    const auto found = std::find(sizes_.begin(), sizes_.end(), shape);
    if (found != sizes_.end()) return static_cast<std::size_t>(found - sizes_.begin());
    throw Error(ErrorCode::kInternal, "no edge shapes for a micro-batch of " + to_string(shape));
  }

  std::vector<UnitShape> sizes_;
  std::vector<std::vector<std::vector<EdgeTensor>>> edges_;
  std::vector<std::vector<TensorSpec>> answers_;
};

enum class RouteKind : std::uint8_t {
  kLocal,   // both stages are on one rank: no message
  kHost,    // messages of host memory
  kStaged,  // messages through page-locked host memory; a GPU at one end or both
  kDirect,  // MPI reads and writes the GPUs' memory
  kNccl,    // NCCL, from GPU to GPU
};

struct EdgeRoute {
  RouteKind kind = RouteKind::kLocal;
  std::string reason;
};

struct RouteQuestion {
  TransportChoice wanted = TransportChoice::kAuto;
  std::string no_device_messages;   // as why_no_device_messages
  std::string nccl_refusal;         // as find_why_no_nccl
  std::vector<RankDevice> devices;  // [rank of the pipeline]
  int tensor_ranks = 1;             // that share its stages
};

// Why NCCL cannot join the GPUs of a job, as far as this build and `job` ([rank of the job]) say:
// the build has no NCCL, or two ranks share a GPU. Else empty.
[[nodiscard]] std::string why_no_nccl(const std::vector<RankDevice>& job);
// Collective over `world`. The same, or the first rank whose NCCL or driver cannot be used. Looks
// for NCCL only where it could be chosen: the job has several GPUs, and `wanted` is not kMpi.
[[nodiscard]] std::string find_why_no_nccl(Collectives& world, const std::vector<RankDevice>& job,
                                           TransportChoice wanted);
// Collective over `world`. Why MPI of some rank does not take a GPU's memory; empty where all do.
// `job`: [rank of the job]; `no_nccl`: as find_why_no_nccl(); `depth`: ranks of a pipeline.
// MPI is tried only where a message may need it, else the answer is kDeviceMessagesNotTried: a
// library that wrongly claims support may end the process.
inline constexpr const char* kDeviceMessagesNotTried = "not tried: no edge needs it";
[[nodiscard]] std::string why_no_device_messages(Collectives& world,
                                                 const std::vector<RankDevice>& job,
                                                 TransportChoice wanted, const std::string& no_nccl,
                                                 int depth);

// Chooses the routes between the ranks of a pipeline, both directions each. NCCL joins a rank with
// at most kMostNcclPartners others, one less with tensor ranks; those that are asked for first come
// first. Throw Error(kUsage) that names both ranks where the wanted transport cannot carry a route.
class RouteChoice {
 public:
  explicit RouteChoice(const RouteQuestion& question);  // which outlives it

  // [stage s]: the edge between stages s - 1 and s; entry 0 is local. Where any edge is kNccl, none
  // is kDirect: CUDA-aware MPI and NCCL together can deadlock.
  [[nodiscard]] std::vector<EdgeRoute> edges(const Placement& placement);
  // Never kDirect.
  [[nodiscard]] EdgeRoute between(int from, int to);

 private:
  const RouteQuestion& question_;
  std::vector<std::set<int>> partners_;  // [rank], over NCCL
};

// What sums the gradients of pipeline rank `rank` over `replicas` replicas: kLocal for one replica,
// else kHost, kStaged or kNccl. Throws Error(kUsage) that names the rank where NCCL is wanted and
// cannot be used.
[[nodiscard]] EdgeRoute choose_sum_route(int rank, int replicas, const RouteQuestion& question);

// What carries the collectives of a GPU's values over the ranks that share the stages of pipeline
// rank `rank`: likewise.
[[nodiscard]] EdgeRoute choose_tensor_route(int rank, const RouteQuestion& question);

[[nodiscard]] bool uses_nccl(const std::vector<EdgeRoute>& routes);

// Lines for the start of a run: edges of one kind and reason together.
[[nodiscard]] std::string describe_routes(const std::vector<EdgeRoute>& routes);
// The same for choose_sum_route() of every pipeline rank; `all_reduce`: in NCCL's own order.
[[nodiscard]] std::string describe_sums(const std::vector<EdgeRoute>& sums, bool all_reduce);
// The same for choose_tensor_route().
[[nodiscard]] std::string describe_tensor(const std::vector<EdgeRoute>& tensor);
// "NCCL (a GPU of its own at both ends)".
[[nodiscard]] std::string describe_route(const EdgeRoute& route);

}  // namespace sluice
