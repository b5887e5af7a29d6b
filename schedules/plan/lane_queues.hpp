// In-order queues of groups, as NCCL's communicators have them: what verify() replays to prove that
// a plan ends, and simulate() to know when. One model for both.
//
// A rank issues groups of messages into queues. A queue's first group runs once all of it is
// issued, ready, and the group before it has ended. A message moves while it runs at both ends, and
// takes its time from when the later end begins; a group ends when its last message has moved. So a
// receive that is issued holds back the sends behind it until its own message has come. For a proof
// nothing takes time.
//
// Linear in the number of messages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include <sluice/plan.hpp>

#include "schedules/model/index.hpp"

namespace sluice {

struct LaneMember {
  std::int32_t channel = -1, index = -1;  // of a message: position in the channel's FIFO
  bool receives = false;
  bool joins = false;  // the group of the member before
  double ready = 0;    // when it could start
};

class LaneQueues {
 public:
  // A queue per rank, which has its number, or where `per_pair` two for each ordered pair of ranks:
  // 2n of the n-th pair that sends, the sender's end, and 2n + 1, the receiver's. `times`:
  // [channel] what a message takes; empty: nothing.
  LaneQueues(const Plan& plan, bool per_pair, const std::vector<double>& times = {})
      : channels_(plan.channels.size()), sides_(plan.channels.size()) {
    std::map<std::pair<int, int>, std::size_t> pairs;
    for (const Channel& channel : plan.channels) pairs[{channel.from_rank, channel.to_rank}] = 0;
    std::size_t next = 0;
    for (auto& [ranks, first] : pairs) first = 2 * next++;
    queues_.resize(per_pair ? 2 * next : plan.ranks.size());
    for (std::size_t i = 0; i < channels_.size(); ++i) {
      const int from = plan.channels[i].from_rank, to = plan.channels[i].to_rank;
      const std::size_t first = pairs[{from, to}];
      channels_[i] = {per_pair ? first : at(from), per_pair ? first + 1 : at(to),
                      times.empty() ? 0 : times[i]};
    }
  }

  // The next message of the channel at one of its ends. `with_previous` as PlanOp's. settle()
  // follows the last one of a group.
  void issue(std::int32_t channel, bool receives, bool with_previous, double ready = 0) {
    if (!with_previous) ++groups_;
    Sides& sides = sides_[at(channel)];
    const std::size_t index = queue_of(channel, receives);
    Queue& queue = queues_[index];
    const bool joins = queue.last_group == groups_;
    queue.last_group = groups_;
    const std::int32_t number = (receives ? sides.posted : sides.started)++;
    queue.members.push_back({channel, number, receives, joins, ready});
    if (!joins) touched_.push_back(index);
  }

  // Starts what can run. Calls ended(member, time) for each member of a group that ends.
  template <class Ended>
  void settle(const Ended& ended) {
    for (const std::size_t each : touched_) {
      if (!queues_[each].runs) run_first(each);
    }
    touched_.clear();
    while (!ended_.empty()) {
      const std::size_t each = ended_.back();
      ended_.pop_back();
      end_first(each, ended);
    }
  }

  [[nodiscard]] std::size_t queue_of(std::int32_t channel, bool receives) const {
    const Lane& ends = channels_[at(channel)];
    return receives ? ends.receiving : ends.sending;
  }
  // Whether that end of the message has been in a group that ran to its end.
  [[nodiscard]] bool is_done(std::int32_t channel, std::int32_t index, bool receives) const {
    const Sides& sides = sides_[at(channel)];
    return (receives ? sides.received : sides.sent) > index;
  }
  // Issued and not ended, the group that runs first.
  [[nodiscard]] std::span<const LaneMember> waiting(std::size_t queue) const {
    return std::span(queues_[queue].members).subspan(queues_[queue].first);
  }
  // The first message of the group that runs whose other end does not. Requires: there is one.
  [[nodiscard]] const LaneMember& unmatched(std::size_t queue) const {
    for (const LaneMember& member : waiting(queue)) {
      if (!other_end_runs(member)) return member;
    }
    return waiting(queue).front();
  }

 private:
  struct Queue {
    std::vector<LaneMember> members;  // from `first` on they are issued and have not ended
    std::size_t first = 0, group_end = 0;
    std::int32_t unmatched = 0;  // members of the group that runs whose other end does not
    bool runs = false;
    double start = 0, end = 0;    // of the group that runs, as far as it is matched
    double free = 0;              // when the last group ended
    std::int64_t last_group = 0;  // that was issued into it
  };

  // Which queue holds which end of a channel, and what a message of it takes.
  struct Lane {
    std::size_t sending = 0, receiving = 0;
    double time = 0;
  };

  // How many of a channel's messages have been issued at each end, run or ran there, and have ended
  // there.
  struct Sides {
    std::int32_t started = 0, posted = 0, sending = 0, receiving = 0, sent = 0, received = 0;
  };

  [[nodiscard]] bool other_end_runs(const LaneMember& member) const {
    const Sides& sides = sides_[at(member.channel)];
    return (member.receives ? sides.sending : sides.receiving) > member.index;
  }

  // Starts the group at the head of a queue that has one.
  void run_first(std::size_t index) {
    Queue& queue = queues_[index];
    queue.runs = true;
    queue.unmatched = 0;
    queue.start = queue.free;
    std::size_t i = queue.first;
    do {
      queue.start = std::max(queue.start, queue.members[i].ready);
    } while (++i < queue.members.size() && queue.members[i].joins);
    queue.group_end = i;
    queue.end = queue.start;
    for (i = queue.first; i < queue.group_end; ++i) {
      const LaneMember& member = queue.members[i];
      Sides& sides = sides_[at(member.channel)];
      (member.receives ? sides.receiving : sides.sending) = member.index + 1;
      if (!other_end_runs(member)) {
        ++queue.unmatched;
        continue;
      }
      const std::size_t other = queue_of(member.channel, !member.receives);
      const double moved =
          std::max(queue.start, queues_[other].start) + channels_[at(member.channel)].time;
      queue.end = std::max(queue.end, moved);
      queues_[other].end = std::max(queues_[other].end, moved);
      if (--queues_[other].unmatched == 0) ended_.push_back(other);
    }
    if (queue.unmatched == 0) ended_.push_back(index);
  }

  template <class Ended>
  void end_first(std::size_t index, const Ended& ended) {
    Queue& queue = queues_[index];
    for (; queue.first < queue.group_end; ++queue.first) {
      const LaneMember& member = queue.members[queue.first];
      Sides& sides = sides_[at(member.channel)];
      (member.receives ? sides.received : sides.sent) = member.index + 1;
      ended(member, queue.end);
    }
    queue.runs = false;
    queue.free = queue.end;
    if (queue.first == queue.members.size()) {
      queue.members.clear();
      queue.first = 0;
      return;
    }
    if (queue.first >= kCompactFrom && 2 * queue.first >= queue.members.size()) {
      queue.members.erase(queue.members.begin(),
                          queue.members.begin() + static_cast<std::ptrdiff_t>(queue.first));
      queue.first = 0;
    }
    run_first(index);
  }

  static constexpr std::size_t kCompactFrom = 64;

  std::vector<Queue> queues_;
  std::vector<Lane> channels_;
  std::vector<Sides> sides_;          // [channel]
  std::int64_t groups_ = 0;           // issued so far
  std::vector<std::size_t> touched_;  // queues of the group that is being issued
  std::vector<std::size_t> ended_;    // queues whose first group has ended
};

}  // namespace sluice
