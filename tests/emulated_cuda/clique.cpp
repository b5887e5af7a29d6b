#include "tests/emulated_cuda/clique.hpp"

#include <algorithm>
#include <cstdio>
#include <tuple>
#include <utility>

namespace sluice::emulated {

Clique::Clique(int ranks) : members_(static_cast<std::size_t>(ranks)) {}

ncclResult_t Clique::arrive(int rank, int device) {
  const std::lock_guard lock(mutex_);
  const bool is_duplicate =
      member(rank).is_here || std::any_of(members_.begin(), members_.end(), [&](const Member& m) {
        return m.is_here && m.device == device;
      });
  if (is_duplicate) {
    std::fprintf(stderr,
                 "emulated nccl: rank %d on device %d: the rank or the device is taken already\n",
                 rank, device);
    is_refused_ = true;
  }
  member(rank).is_here = true;
  member(rank).device = device;
  changed_.notify_all();
  return is_duplicate ? ncclInvalidUsage : ncclSuccess;
}

ncclResult_t Clique::status_locked() const {
  if (is_refused_) return ncclInvalidUsage;
  const bool is_complete = std::all_of(members_.begin(), members_.end(),
                                       [](const Member& member) { return member.is_here; });
  return is_complete ? ncclSuccess : ncclInProgress;
}

ncclResult_t Clique::status() const {
  const std::lock_guard lock(mutex_);
  return status_locked();
}

ncclResult_t Clique::wait_for_all() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return status_locked() != ncclInProgress; });
  return status_locked();
}

void Clique::run_group(int rank, const std::vector<Operation>& operations) {
  std::unique_lock lock(mutex_);
  if (member(rank).is_aborted) return;
  Postings own;
  std::vector<Postings> matches;
  for (const Operation& operation : operations) {
    own.push_back(std::make_shared<Posting>(Posting{operation, rank}));
    post(own.back(), matches);
  }
  for (const Postings& match : matches) complete(lock, match);
  changed_.wait(lock, [&] {
    return member(rank).is_aborted || std::all_of(own.begin(), own.end(), [](const auto& posting) {
             return posting->is_done;
           });
  });
  withdraw(own);
}

void Clique::wait_for_abort(int rank) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return member(rank).is_aborted; });
}

void Clique::abort(int rank) {
  std::unique_lock lock(mutex_);
  member(rank).is_aborted = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return member(rank).copying == 0; });
}

void Clique::post(const std::shared_ptr<Posting>& posting, std::vector<Postings>& matches) {
  const Operation& operation = posting->operation;
  const int rank = posting->rank;
  const bool is_send = operation.kind == OperationKind::kSend;
  if (is_send || operation.kind == OperationKind::kReceive) {
    Channel& channel =
        channels_[is_send ? std::pair(rank, operation.peer) : std::pair(operation.peer, rank)];
    auto& others = is_send ? channel.receives : channel.sends;
    if (others.empty()) {
      (is_send ? channel.sends : channel.receives).push_back(posting);
      return;
    }
    const std::shared_ptr<Posting> other = others.front();
    others.pop_front();
    matches.push_back(is_send ? Postings{posting, other} : Postings{other, posting});
    return;
  }
  const std::uint64_t number = member(rank).collectives++;
  Postings& all = collectives_[number];
  all.resize(members_.size());
  all[static_cast<std::size_t>(rank)] = posting;
  if (std::find(all.begin(), all.end(), nullptr) != all.end()) return;
  matches.push_back(std::move(all));
  collectives_.erase(number);
}

void Clique::withdraw(const Postings& postings) {
  const auto is_ours = [&](const std::shared_ptr<Posting>& posting) {
    return std::find(postings.begin(), postings.end(), posting) != postings.end();
  };
  for (auto& [ends, channel] : channels_) {
    std::erase_if(channel.sends, is_ours);
    std::erase_if(channel.receives, is_ours);
  }
  for (auto& [number, all] : collectives_) {
    for (auto& posting : all) {
      if (posting != nullptr && is_ours(posting)) posting = nullptr;
    }
  }
}

// What does not fit never ends, as on the real thing, but says so.
bool Clique::is_consistent(const Postings& match) {
  const Operation& first = match.front()->operation;
  const bool is_pair = first.kind == OperationKind::kSend;
  for (const auto& posting : match) {
    const Operation& other = posting->operation;
    const bool fits = other.count == first.count && other.type == first.type &&
                      (is_pair || (other.kind == first.kind && other.peer == first.peer &&
                                   other.reduction == first.reduction));
    if (fits) continue;
    std::fprintf(stderr,
                 "emulated nccl: ranks %d and %d meet in operations that differ (%zu elements of "
                 "type %d, %zu of type %d); NCCL would hang or deliver rubbish, this waits\n",
                 match.front()->rank, posting->rank, first.count, static_cast<int>(first.type),
                 other.count, static_cast<int>(other.type));
    return false;
  }
  return true;
}

void Clique::complete(std::unique_lock<std::mutex>& lock, const Postings& match) {
  if (!is_consistent(match)) return;
  const bool is_anyone_gone = std::any_of(match.begin(), match.end(), [this](const auto& posting) {
    return member(posting->rank).is_aborted;
  });
  if (is_anyone_gone) return;
  std::vector<const Operation*> operations;
  for (const auto& posting : match) {
    operations.push_back(&posting->operation);
    ++member(posting->rank).copying;
  }
  lock.unlock();
  carry_out(operations);
  lock.lock();
  for (const auto& posting : match) {
    posting->is_done = true;
    --member(posting->rank).copying;
  }
  changed_.notify_all();
}

void Clique::split(int rank, int device, int color, int key,
                   std::shared_ptr<Membership> membership) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = member(rank).splits++;
  std::vector<Splitting>& all = splits_[number];
  all.push_back({color, key, rank, device, std::move(membership)});
  if (all.size() < members_.size()) return;
  finish_split(all);
  splits_.erase(number);
  changed_.notify_all();
}

void Clique::finish_split(const std::vector<Splitting>& all) {
  std::map<int, std::vector<const Splitting*>> colors;
  for (const Splitting& one : all) {
    one.membership->is_known = true;
    if (one.color != NCCL_SPLIT_NOCOLOR) colors[one.color].push_back(&one);
  }
  for (auto& [color, members] : colors) {
    std::sort(members.begin(), members.end(), [](const Splitting* a, const Splitting* b) {
      return std::tie(a->key, a->rank) < std::tie(b->key, b->rank);
    });
    auto clique = std::make_shared<Clique>(static_cast<int>(members.size()));
    int rank = 0;
    for (const Splitting* one : members) {
      one->membership->clique = clique;
      one->membership->rank = rank;
      clique->arrive(rank++, one->device);
    }
  }
}

void Clique::wait_for(const Membership& membership) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return membership.is_known; });
}

bool Clique::is_known(const Membership& membership) const {
  const std::lock_guard lock(mutex_);
  return membership.is_known;
}

}  // namespace sluice::emulated
