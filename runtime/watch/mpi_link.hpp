// A Link over MPI, for hosts whose ports are closed to each other. Its communicator is used by the
// watchdog's thread alone, beside the program's, so MPI must grant MPI_THREAD_MULTIPLE. MPI does
// not tell that a process has ended: such a rank is silent.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include <sluice/communicator.hpp>

#include "runtime/watch/link.hpp"

namespace sluice {

class MpiLink final : public Link {
 public:
  // `comm` is the job's, and outlives this. Requires comm.any_thread().
  MpiLink(Communicator& comm, Listener& listener);
  ~MpiLink() override;
  MpiLink(const MpiLink&) = delete;
  MpiLink& operator=(const MpiLink&) = delete;

  void send(int rank, NoteKind kind, std::span<const std::byte> contents) override;
  void progress() override;
  void close() override;

 private:
  static constexpr std::size_t kNoteBytes = 1 + kMostNoteBytes;
  using Note = std::array<std::byte, kNoteBytes>;
  // To one rank.
  struct Outgoing {
    Request request;
    std::vector<std::vector<std::byte>> waiting;  // the first is under way
  };
  struct Memory {
    Note incoming;
    std::vector<Outgoing> outgoing;  // [rank]
  };

  void post();
  // Moves on with what goes to a rank; true once nothing waits.
  bool push(int rank);

  Communicator& comm_;
  Listener& listener_;
  std::shared_ptr<Memory> memory_;  // the communicator keeps it while messages go on
  Request receive_;
};

}  // namespace sluice
