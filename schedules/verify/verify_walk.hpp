// The walk that every transport model shares. Each rank goes through its events until it must wait,
// and is visited again only when what it waits for may have happened. Linear in the number
// of events as long as the model wakes a rank only for its own message.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <sluice/plan.hpp>
#include <sluice/verify.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/verify/verify_trace.hpp"

namespace sluice {

// `Model` derives from this and has, public:
//   bool issue(std::size_t rank, const ProgressEvent& event);  // a post or a start; false: not yet
//   bool is_done(const ProgressEvent& wait) const;             // kWaitRecv or kWaitSend
//   Violation deadlock(int rank) const;                      // of a rank that is blocked
template <class Model>
class ProgressWalk {
 public:
  ProgressWalk(const Plan& plan, const PlanTrace& trace)
      : plan_(plan), trace_(trace), cursors_(plan.ranks.size()) {
    for (const TiedStages& group : plan.tied) collectives_.push_back({parties_of(group), 0});
    Collective all;
    for (int rank = 0; rank < plan.placement.ranks(); ++rank) all.parties.push_back(rank);
    collectives_.push_back(std::move(all));
  }

  std::optional<Violation> run() {
    for (std::size_t rank = cursors_.size(); rank-- > 0;) ready_.push_back(rank);
    while (!ready_.empty()) {
      const std::size_t rank = ready_.back();
      ready_.pop_back();
      advance(rank);
    }
    for (std::size_t rank = 0; rank < cursors_.size(); ++rank) {
      if (cursors_[rank].blocked) return model().deadlock(static_cast<int>(rank));
    }
    return std::nullopt;
  }

 protected:
  [[nodiscard]] bool blocked(std::size_t rank) const { return cursors_[rank].blocked; }
  [[nodiscard]] bool finished(int rank) const {
    return cursors_[at(rank)].position == trace_.events[at(rank)].size();
  }
  // What the rank does next; not for one that has finished.
  [[nodiscard]] const ProgressEvent& event_at(std::size_t rank) const {
    return trace_.events[rank][cursors_[rank].position];
  }
  // The event after that one, or null.
  [[nodiscard]] const ProgressEvent* next_event(std::size_t rank) const {
    const std::size_t next = cursors_[rank].position + 1;
    return next < trace_.events[rank].size() ? &trace_.events[rank][next] : nullptr;
  }
  [[nodiscard]] const Channel& channel_of(std::int32_t channel) const {
    return plan_.channels[at(channel)];
  }
  [[nodiscard]] std::size_t sender_of(std::int32_t channel) const {
    return at(channel_of(channel).from_rank);
  }
  [[nodiscard]] std::size_t receiver_of(std::int32_t channel) const {
    return at(channel_of(channel).to_rank);
  }

  void wake(std::size_t rank) {
    cursors_[rank].blocked = false;
    ready_.push_back(rank);
  }
  // Wakes the rank if a wait of that kind and channel holds it.
  void wake_waiting(std::size_t rank, OpKind kind, std::int32_t channel) {
    if (!cursors_[rank].blocked) return;
    const ProgressEvent& awaited = event_at(rank);
    if (awaited.kind == kind && awaited.channel == channel) wake(rank);
  }

  // The rest puts a deadlock into words.

  // A party that has not come to the collective.
  [[nodiscard]] int missing_party(const ProgressEvent& event) const {
    const std::size_t wanted = collective_of(event);
    for (const int party : collectives_[wanted].parties) {
      const auto rank = at(party);
      const bool waits = cursors_[rank].blocked && cursors_[rank].arrived &&
                         collective_of(event_at(rank)) == wanted;
      if (!waits) return party;
    }
    return collectives_[wanted].parties.front();
  }

  // Index of the op that left the rank's current event.
  [[nodiscard]] int op_position(int rank) const {
    std::size_t left = cursors_[at(rank)].position;
    std::size_t i = 0;
    for (;; ++i) {
      if (leaves_event(ops_of(rank)[i].kind) && left-- == 0) return static_cast<int>(i);
    }
  }
  [[nodiscard]] const std::vector<PlanOp>& ops_of(int rank) const {
    return plan_.ranks[at(rank)].ops;
  }
  // "op 3 (send 0SEND_F1 ...)"
  [[nodiscard]] std::string op_text(int rank, int position) const {
    return concat("op ", position, " (", ops_of(rank)[at(position)], ")");
  }

  // Who waits for whom from a blocked `holder` on, until one repeats or a list has ended. The model
  // has, for its type of holder: awaited(), has_ended(), rank_of(), position_of(), waits() as text.
  template <class Holder>
  [[nodiscard, gnu::cold, gnu::noinline]] Violation follow(TransportModel name,
                                                           Holder holder) const {
    const auto& model = static_cast<const Model&>(*this);
    std::vector<Holder> chain;
    while (std::find(chain.begin(), chain.end(), holder) == chain.end()) {
      if (model.has_ended(holder)) {
        const Holder& last = chain.back();
        return {model.rank_of(last), model.position_of(last),
                concat("under the ", name_of(name), " model the plan cannot finish: ",
                       model.waits(last), ", whose list has ended")};
      }
      chain.push_back(holder);
      holder = model.awaited(holder);
    }
    chain.erase(chain.begin(), std::find(chain.begin(), chain.end(), holder));
    const auto first = std::min_element(
        chain.begin(), chain.end(),
        [&](const Holder& a, const Holder& b) { return model.rank_of(a) < model.rank_of(b); });
    std::rotate(chain.begin(), first, chain.end());
    std::string text = concat("under the ", name_of(name), " model the plan deadlocks: ");
    for (std::size_t i = 0; i < chain.size(); ++i) {
      text += concat(i == 0 ? "" : "; ", model.waits(chain[i]));
    }
    return {model.rank_of(chain.front()), model.position_of(chain.front()), text};
  }

  const Plan& plan_;
  const PlanTrace& trace_;

 private:
  struct Cursor {
    std::size_t position = 0;
    bool blocked = false;
    bool arrived = false;  // counted at its collective
  };

  struct Collective {
    std::vector<int> parties;
    std::size_t arrived = 0;
  };

  Model& model() { return static_cast<Model&>(*this); }

  std::vector<int> parties_of(const TiedStages& group) const {
    std::vector<int> ranks;
    for (const int stage : group.stages) ranks.push_back(plan_.placement.rank_of(stage));
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  [[nodiscard]] std::size_t collective_of(const ProgressEvent& event) const {
    return event.kind == OpKind::kOptimizer ? collectives_.size() - 1 : at(event.channel);
  }

  void advance(std::size_t rank) {
    Cursor& cursor = cursors_[rank];
    const std::vector<ProgressEvent>& events = trace_.events[rank];
    for (; cursor.position < events.size(); ++cursor.position) {
      if (!step(rank, events[cursor.position])) {
        cursor.blocked = true;
        return;
      }
      cursor.arrived = false;
    }
  }

  // False where the rank must wait; it is then asked again once that may have changed.
  bool step(std::size_t rank, const ProgressEvent& event) {
    switch (event.kind) {
      case OpKind::kPostRecv:
      case OpKind::kStartSend:
        return model().issue(rank, event);
      case OpKind::kWaitRecv:
      case OpKind::kWaitSend:
        return model().is_done(event);
      default:
        return join(rank, collectives_[collective_of(event)]);
    }
  }

  bool join(std::size_t rank, Collective& collective) {
    if (!cursors_[rank].arrived) {
      cursors_[rank].arrived = true;
      if (++collective.arrived == collective.parties.size()) {
        for (const int party : collective.parties) {
          if (at(party) != rank) wake(at(party));
        }
      }
    }
    return collective.arrived == collective.parties.size();
  }

  std::vector<Cursor> cursors_;          // [rank]
  std::vector<Collective> collectives_;  // one per tied group, then the optimizer's
  std::vector<std::size_t> ready_;
};

}  // namespace sluice
