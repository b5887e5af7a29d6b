#include "runtime/watch/mpi_link.hpp"

#include <chrono>
#include <limits>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {
namespace {

constexpr int kTag = 0;
constexpr std::size_t kMostWaiting = 16;  // notes to one rank
constexpr auto kLinkCloseTime = std::chrono::milliseconds(200);

}  // namespace

MpiLink::MpiLink(Communicator& comm, Listener& listener)
    : comm_(comm), listener_(listener), memory_(std::make_shared<Memory>()) {
  memory_->outgoing.resize(at(comm.size()));
  post();
}

MpiLink::~MpiLink() {
  try {
    comm_.cancel(receive_);
    for (Outgoing& each : memory_->outgoing) comm_.cancel(each.request);
    comm_.keep(memory_);
  } catch (const Error&) {  // the requests are lost with the communicator
  }
}

void MpiLink::post() {
  receive_ = comm_.post_recv(Communicator::kAnyPeer, kTag, memory_->incoming);
}

void MpiLink::send(int rank, NoteKind kind, std::span<const std::byte> contents) {
  if (rank == comm_.rank() || contents.size() > kMostNoteBytes) return;
  Outgoing& to = memory_->outgoing[at(rank)];
  const std::size_t most = kind == NoteKind::kStatus ? 1 : kMostWaiting;
  push(rank);
  if (to.waiting.size() >= most) return;
  std::vector<std::byte> note = {static_cast<std::byte>(kind)};
  note.insert(note.end(), contents.begin(), contents.end());
  to.waiting.push_back(std::move(note));
  push(rank);
}

bool MpiLink::push(int rank) {
  Outgoing& to = memory_->outgoing[at(rank)];
  try {
    while (!to.waiting.empty()) {
      if (to.request.index != Request::kNone) {
        if (!comm_.test(to.request)) return false;
        to.waiting.erase(to.waiting.begin());
        continue;
      }
      to.request = comm_.start_send(rank, kTag, to.waiting.front());
      if (to.request.index == Request::kNone) to.waiting.erase(to.waiting.begin());
    }
  } catch (const Error&) {  // MPI has lost the rank: it will be silent
    to.waiting.clear();
    to.request = Request{};
  }
  return true;
}

void MpiLink::progress() {
  try {
    Arrival arrival;
    while (receive_.index != Request::kNone && comm_.test(receive_, &arrival)) {
      const std::span<const std::byte> note = std::span(memory_->incoming).first(arrival.bytes);
      if (!note.empty() && note.front() <= static_cast<std::byte>(NoteKind::kAnswer)) {
        listener_.on_note(arrival.source, static_cast<NoteKind>(note.front()), note.subspan(1));
      }
      post();
    }
  } catch (const Error&) {  // MPI has failed: all are silent from now on
    receive_ = Request{};
  }
  for (int rank = 0; rank < comm_.size(); ++rank) push(rank);
}

void MpiLink::close() {
  for (int rank = 0; rank < comm_.size(); ++rank) send(rank, NoteKind::kBye, {});
  Waiter waiter(std::numeric_limits<int>::max());
  const auto until = std::chrono::steady_clock::now() + kLinkCloseTime;
  for (bool all = false; !all && std::chrono::steady_clock::now() < until; waiter.pause()) {
    all = true;
    for (int rank = 0; rank < comm_.size(); ++rank) all = push(rank) && all;
  }
}

}  // namespace sluice
