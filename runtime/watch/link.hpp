// Small messages between the ranks' watchdogs. All calls come from one thread, and none blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace sluice {

enum class NoteKind : std::uint8_t {
  kHello,    // the first of a connection
  kStatus,   // pack() of a RankStatus
  kBye,      // the sender's watchdog ends in order
  kVerdict,  // Verdict::Kind, then the headline as text
  kAnswer,   // to a verdict
};
inline constexpr std::size_t kMostNoteBytes = 8192;  // of a note's contents

class Link {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void on_note(int rank, NoteKind kind, std::span<const std::byte> contents) = 0;
    // The rank's process has closed its end, as the kernel does for a process that dies. Not for a
    // network that fails: a rank behind it is silent.
    virtual void on_end(int rank) = 0;
  };

  virtual ~Link() = default;
  // To a rank that this one exchanges notes with. What the rank does not take waits; of statuses
  // none is kept then.
  virtual void send(int rank, NoteKind kind, std::span<const std::byte> contents) = 0;
  // Does what can be done now. Called at every tick.
  virtual void progress() {}
  // Says goodbye to all ranks, as far as they listen, within 200 ms. The last call.
  virtual void close() = 0;
};

[[nodiscard]] inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace sluice
