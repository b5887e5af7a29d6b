// What a rank does in the halves of an ordered sum, block by block: steps that are a function of
// the ranks' hosts alone. Between two hosts each part crosses once. A gather's part comes to one
// rank of each other host, which passes it on there. Of a sum, what a subtree of
// comm/base/sum_tree.hpp adds on one host crosses as one addend; ranks of different hosts that the
// tree adds first cross as they are. Another rank stands for its host from part to part, so that
// they share the work.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sluice {

struct BlockStep {
  enum class What : std::uint8_t { kReceive, kSend, kReceived, kSent, kAdd };
  static constexpr int kValues = -1;  // a place: the part's own in the caller's values; else a slot

  What what = What::kAdd;
  int part = 0;                         // rank whose part the block is of
  int peer = -1;                        // of a message
  bool second_hand = false;             // a message that its sender made of others'
  int request = -1;                     // of a message
  int place = kValues;                  // of a message's bytes; of kAdd: the sum's
  int left = kValues, right = kValues;  // of kAdd
};

struct BlockSteps {
  std::vector<BlockStep> begin;  // kReceive and kSend, while blocks before it are not done yet
  std::vector<BlockStep> rest;
  int requests = 0, slots = 0;
};

// `hosts`: [rank] equal numbers for ranks of one host. Messages from one rank to another that are
// both second-hand, or both not, have one order on both.
[[nodiscard]] BlockSteps scatter_steps(std::span<const int> hosts, int rank);
[[nodiscard]] BlockSteps gather_steps(std::span<const int> hosts, int rank);

// A block that one rank sends another of another host.
struct Crossing {
  int from = 0, to = 0;
  bool summed = false;  // by ranks of one host, before it crosses
};
// Those of all ranks, where each makes the steps of `steps_of`, one of the two above.
[[nodiscard]] std::vector<Crossing> crossings(std::span<const int> hosts,
                                              BlockSteps (&steps_of)(std::span<const int>, int));

}  // namespace sluice
