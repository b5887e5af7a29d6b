#include "comm/group/block_steps.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <map>
#include <utility>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"

namespace sluice {

namespace {

using What = BlockStep::What;

struct Message {
  int peer, part;
  bool second_hand;
};

class Steps {
 public:
  void receive(const Message& message, int place) {
    start(made_.begin, What::kReceive, message, place);
  }
  void send(const Message& message) {
    start(made_.begin, What::kSend, message, BlockStep::kValues);
  }
  // Of what was received or summed in this block.
  void send_on(const Message& message) {
    start(made_.rest, What::kSend, message, BlockStep::kValues);
  }
  [[nodiscard]] int new_slot() { return made_.slots++; }
  void add(int part, int left, int right) {
    made_.rest.push_back(
        {.what = What::kAdd, .part = part, .place = left, .left = left, .right = right});
  }
  // Of the last addition: the sum is where the part's values are.
  void end_sum() { made_.rest.back().place = BlockStep::kValues; }
  [[nodiscard]] std::size_t begun() const { return made_.begin.size(); }
  // For the message of step `index` of those that begin.
  void wait_for(std::size_t index) { wait_for(made_.begin[index]); }
  // For all messages that nothing waits for yet.
  [[nodiscard]] BlockSteps take() {
    for (const std::vector<BlockStep>& list : {made_.begin, made_.rest}) {
      for (const BlockStep& step : list) {
        if (step.what == What::kReceive || step.what == What::kSend) wait_for(step);
      }
    }
    return std::move(made_);
  }

 private:
  void start(std::vector<BlockStep>& list, What what, const Message& message, int place) {
    list.push_back({.what = what,
                    .part = message.part,
                    .peer = message.peer,
                    .second_hand = message.second_hand,
                    .request = made_.requests++,
                    .place = place});
    waited_.push_back(false);
  }
  void wait_for(const BlockStep& started) {
    if (waited_[at(started.request)]) return;
    waited_[at(started.request)] = true;
    BlockStep end = started;
    end.what = started.what == What::kSend ? What::kSent : What::kReceived;
    made_.rest.push_back(end);
  }

  BlockSteps made_;
  std::vector<bool> waited_;  // [request]
};

// The largest subtrees whose ranks are on one host.
class Units {
 public:
  explicit Units(std::span<const int> hosts) : hosts_(hosts), first_(hosts.size()), last_(first_) {
    divide(0, static_cast<int>(hosts.size()));
  }

  [[nodiscard]] int first(int rank) const { return first_[at(rank)]; }
  [[nodiscard]] int last(int rank) const { return last_[at(rank)]; }  // one beyond
  [[nodiscard]] bool same(int a, int b) const { return first(a) == first(b); }
  // Who adds up the unit of `rank` for `part`.
  [[nodiscard]] int adder(int rank, int part) const {
    return same(rank, part) ? part : first(rank) + part % (last(rank) - first(rank));
  }

 private:
  void divide(int first, int last) {
    const auto of_unit = hosts_.subspan(at(first), at(last - first));
    if (std::count(of_unit.begin(), of_unit.end(), of_unit.front()) == last - first) {
      std::fill(first_.begin() + first, first_.begin() + last, first);
      std::fill(last_.begin() + first, last_.begin() + last, last);
      return;
    }
    const int middle = first + static_cast<int>(std::bit_floor(of_unit.size() - 1));
    divide(first, middle);
    divide(middle, last);
  }

  std::span<const int> hosts_;
  std::vector<int> first_, last_;  // [rank]
};

// A part's addends on this rank: those of its unit, of its own part all.
struct Addends {
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  int part = 0, first = 0;
  std::vector<int> places;            // [rank - first]
  std::vector<std::size_t> receives;  // likewise: a step that begins
};

Addends receive_addends(Steps& steps, const Units& units, int ranks, int me, int part) {
  const int first = part == me ? 0 : units.first(me);
  const int last = part == me ? ranks : units.last(me);
  Addends made{.part = part, .first = first, .places = {}, .receives = {}};
  for (int rank = first; rank < last; ++rank) {
    const bool of_mine = units.same(rank, me);
    const bool comes = rank != me && (of_mine || rank == units.first(rank));
    made.places.push_back(comes ? steps.new_slot() : BlockStep::kValues);
    made.receives.push_back(comes ? steps.begun() : Addends::kNone);
    if (!comes) continue;
    const int peer = of_mine ? rank : units.adder(rank, part);
    steps.receive({.peer = peer, .part = part, .second_hand = !of_mine}, made.places.back());
  }
  return made;
}

void add_up(Steps& steps, const Units& units, int me, const Addends& addends) {
  const std::size_t count = addends.places.size();
  const auto rank = [&](std::size_t leaf) { return addends.first + static_cast<int>(leaf); };
  for (std::size_t leaf = 0; leaf < count; ++leaf) {
    if (addends.receives[leaf] != Addends::kNone) steps.wait_for(addends.receives[leaf]);
    add_leaf(leaf, count, [&](std::size_t into, std::size_t from) {
      // Other units come as their sums.
      if (units.same(rank(into), rank(from)) && !units.same(rank(from), me)) return;
      steps.add(addends.part, addends.places[into], addends.places[from]);
    });
  }
  steps.end_sum();
}

}  // namespace

BlockSteps scatter_steps(std::span<const int> hosts, int rank) {
  const int ranks = static_cast<int>(hosts.size());
  const Units units(hosts);
  const bool alone = units.last(rank) - units.first(rank) == 1;
  Steps steps;
  std::vector<Addends> sums;
  for (int part = 0; part < ranks; ++part) {
    const bool adds = part == rank || (units.adder(rank, part) == rank && !alone);
    if (adds) sums.push_back(receive_addends(steps, units, ranks, rank, part));
    const int adder = units.adder(rank, part);
    if (adder != rank) steps.send({.peer = adder, .part = part, .second_hand = false});
    if (alone && part != rank) steps.send({.peer = part, .part = part, .second_hand = true});
  }
  for (const bool own : {false, true}) {  // others wait for theirs
    for (const Addends& sum : sums) {
      if ((sum.part == rank) != own) continue;
      add_up(steps, units, rank, sum);
      if (!own) steps.send_on({.peer = sum.part, .part = sum.part, .second_hand = true});
    }
  }
  return steps.take();
}

BlockSteps gather_steps(std::span<const int> hosts, int rank) {
  const int ranks = static_cast<int>(hosts.size());
  std::map<int, std::vector<int>> of_host;
  for (int each = 0; each < ranks; ++each) of_host[hosts[at(each)]].push_back(each);
  // Through whom a part comes to the host of `to`.
  const auto entry = [&](int part, int to) {
    const std::vector<int>& there = of_host[hosts[at(to)]];
    return hosts[at(part)] == hosts[at(to)] ? part : there[at(part) % there.size()];
  };
  Steps steps;
  std::vector<std::size_t> passes_on;  // receives
  std::vector<int> parts;              // of them
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    const int from = entry(peer, rank);
    if (from == rank) {
      passes_on.push_back(steps.begun());
      parts.push_back(peer);
    }
    const bool direct = from == rank || from == peer;
    steps.receive({.peer = direct ? peer : from, .part = peer, .second_hand = !direct},
                  BlockStep::kValues);
    const int to = entry(rank, peer);
    if (to == rank || to == peer) {
      steps.send({.peer = peer, .part = rank, .second_hand = false});
    }
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    steps.wait_for(passes_on[i]);
    for (const int peer : of_host[hosts[at(rank)]]) {
      if (peer != rank) steps.send_on({.peer = peer, .part = parts[i], .second_hand = true});
    }
  }
  return steps.take();
}

std::vector<Crossing> crossings(std::span<const int> hosts,
                                BlockSteps (&steps_of)(std::span<const int>, int)) {
  std::vector<Crossing> made;
  if (std::count(hosts.begin(), hosts.end(), hosts.front()) == std::ssize(hosts)) return made;
  for (int rank = 0; rank < std::ssize(hosts); ++rank) {
    const BlockSteps steps = steps_of(hosts, rank);
    const auto add = [&](const std::vector<BlockStep>& list, bool summed) {
      for (const BlockStep& step : list) {
        if (step.what != What::kSend || hosts[at(rank)] == hosts[at(step.peer)]) continue;
        made.push_back({rank, step.peer, summed});
      }
    };
    add(steps.begin, false);
    add(steps.rest, true);
  }
  return made;
}

}  // namespace sluice
