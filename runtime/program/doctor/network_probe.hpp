// Measures the links between ranks that a training would use: one pair of ranks at a time, then all
// at once, then all at once while every rank computes. Uses the Communicator alone.
//
// All calls are collective. Times are wall-clock seconds, bandwidths bytes per second.
#pragma once

#include <string>
#include <vector>

#include "comm/group/communicator.hpp"
#include "comm/group/topology.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {

// Two ranks that exchange messages, in both directions.
struct RankPair {
  int low = 0, high = 0;  // ranks of the job, low < high
  friend bool operator==(const RankPair&, const RankPair&) = default;
};

// Every pair that a training uses, once: neighbours of each pipeline, with chunks > 1 also its last
// and first rank, then the replicas of each stage.
[[nodiscard]] std::vector<RankPair> pairs_of_training(const Topology& topology, int chunks);

struct ProbeLimits {
  double pair_seconds = 0.25;   // of one pair, both directions
  double total_seconds = 20;    // no pair but the first begins later; all at once comes on top
  double silence_seconds = 30;  // a rank that waits longer gives up
};

// What one direction of a pair does.
struct LinkFigures {
  int from = 0, to = 0;
  double latency = 0;           // of 8 bytes, half of a median round trip
  double bandwidth = 0;         // of pieces of up to 4 MiB, two under way
  double shared_bandwidth = 0;  // of one message and its answer, while all links carry one
  // How much of that time (0 to 1) passes while all ranks compute for as long as the messages of
  // all take, without a call of the communicator. 0: nothing moves meanwhile.
  double advanced = 0;
};

struct ProbeResult {
  std::vector<LinkFigures> links;  // two of each measured pair; on rank 0, empty on the others
  int pairs_left_out = 0;          // for want of time
};

// `pairs` are the same on all ranks, each pair stands once. Tags base_tag..base_tag+13 of `comm`
// are the call's. Throws Error(kPeer) naming the ranks where an answer takes longer than
// silence_seconds; requests are cancelled then.
[[nodiscard]] ProbeResult probe_links(Communicator& comm, int base_tag,
                                      const std::vector<RankPair>& pairs,
                                      const ProbeLimits& limits);

// The upper one: of two of which one is slow it is the quick one. Not collective.
[[nodiscard]] double median(std::vector<double> values);

// Ends a wait that has lasted too long by Error(kPeer), saying `what` the rank waited for.
class SilenceLimit : public Interrupt {
 public:
  SilenceLimit(int rank, double seconds, std::string what);
  // Another wait begins.
  void restart();
  void poll() override;

 private:
  int rank_;
  double seconds_, until_ = 0;
  std::string what_;
};

}  // namespace sluice
