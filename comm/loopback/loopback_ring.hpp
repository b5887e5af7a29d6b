// The way of loopback's messages from one rank to another: a ring of cells in memory that both
// reach, with one writer and one reader, each the thread of its rank. Internal to comm/.
//
// A message takes one cell or several in a row. Its first cell's `sequence` is stored last and says
// that all of them are there; a cell's count of uses never repeats, so nothing is cleared, and a
// message of up to kCellRoom bytes costs the transfer of the two cache lines that it fills. The
// reader tells how far it is only now and then, and the writer looks only when the ring seems full.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>

namespace sluice::loopback {

inline constexpr std::size_t kCellRoom = 104;     // bytes of a message per cell
inline constexpr std::size_t kRingCells = 512;    // a power of two
inline constexpr std::size_t kEagerBytes = 4096;  // the largest message that travels in the ring
inline constexpr std::uint64_t kTellEvery = 64;   // cells read between two updates for the writer

// What a message is matched by, and how long it is.
struct Label {
  std::uint32_t context;  // of its communicator
  std::int32_t tag;
  std::uint32_t bytes;
  std::uint32_t offered;  // 1: the bytes are an Offered, not the message
};

// Two cache lines, which hardware fetches as a pair.
struct alignas(128) Cell {
  std::uint64_t sequence;  // 1 + the number of cells of the ring used before this one
  Label label;
  std::array<std::byte, kCellRoom> room;
};
static_assert(sizeof(Cell) == 128);
inline constexpr std::size_t kFirstLine = 64 - offsetof(Cell, room);  // of the room

// How a message above kEagerBytes is handed over: the reader copies from the writer's memory.
struct alignas(64) Offer {
  enum class State : int {
    kOffered,    // may be taken by the reader, or withdrawn by the writer
    kCopying,    // the reader reads the memory
    kDone,       // copied; the reader knows it no more
    kWithdrawn,  // the reader must not take it
    kDropped,    // will never be copied; the reader knows it no more
  };
  std::atomic<State> state = State::kDropped;
};

// In the ring in place of such a message.
struct Offered {
  Offer* offer;
  const std::byte* data;
  std::size_t bytes;
};
static_assert(sizeof(Offered) <= kCellRoom);

// All rings of `ranks` ranks. Pages never used cost nothing.
class Rings {
 public:
  // Of one ring, told by its reader: cells that it has read.
  struct alignas(128) Progress {
    std::atomic<std::uint64_t> cells_read = 0;
  };

  explicit Rings(std::size_t ranks)
      : ranks_(ranks), progress_(std::make_unique<Progress[]>(ranks * ranks)) {
    void* memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::bad_alloc();
    }
    cells_ = static_cast<Cell*>(memory);
  }
  ~Rings() { munmap(cells_, bytes()); }
  Rings(const Rings&) = delete;
  Rings& operator=(const Rings&) = delete;

  [[nodiscard]] Cell* cells(std::size_t from, std::size_t to) const {
    return cells_ + (from * ranks_ + to) * kRingCells;
  }
  [[nodiscard]] Progress& progress(std::size_t from, std::size_t to) const {
    return progress_[from * ranks_ + to];
  }

 private:
  [[nodiscard]] std::size_t bytes() const { return ranks_ * ranks_ * kRingCells * sizeof(Cell); }

  std::size_t ranks_;
  std::unique_ptr<Progress[]> progress_;
  Cell* cells_ = nullptr;
};

// Calls the library's memcpy: a copy bounded by a cell's room would be expanded word by word, were
// the bound known here.
#ifdef __clang__
[[gnu::noinline]]
#else
[[gnu::noipa]]
#endif
inline void
copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

// Begins to take a cell that will be written within some 50 ns from the core that reads it; the
// reader, which looks at it all the time, would have it back soon after. A hint.
inline void take_over(const Cell& cell) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(cell));
  asm volatile("prefetchw %0" ::"m"(cell.room[kFirstLine]));
#else
  static_cast<void>(cell);
#endif
}

// Lets a cell that is written go to the cache that cores share, where its reader finds it sooner
// than in this core's. A hint (CLDEMOTE), which processors without it take for no operation.
inline void hand_over(const Cell& cell) {
#if defined(__x86_64__)
  asm volatile("cldemote %0" ::"m"(cell));
  asm volatile("cldemote %0" ::"m"(cell.room[kFirstLine]));
#else
  static_cast<void>(cell);
#endif
}

inline std::size_t cells_of(std::size_t bytes) {
  return bytes <= kCellRoom ? 1 : (bytes + kCellRoom - 1) / kCellRoom;
}

// The writing end of a ring.
class Writer {
 public:
  Writer(const Rings& rings, std::size_t from, std::size_t to)
      : cells_(rings.cells(from, to)), reader_(&rings.progress(from, to)) {}

  [[nodiscard]] bool has_room(std::size_t bytes) {
    const std::uint64_t end = next_ + cells_of(bytes);
    if (end - read_ > kRingCells) {
      read_ = reader_->cells_read.load(std::memory_order_acquire);
    }
    return end - read_ <= kRingCells;
  }

  void prepare() const { take_over(cells_[next_ % kRingCells]); }

  // Where there is room. Whatever lies outside the first line goes first: the reader looks at that
  // line all the time, and would take it away between two stores that something holds up.
  void write(std::uint32_t context, std::int32_t tag, const std::byte* data, std::uint32_t bytes,
             bool offered) {
    Cell& first = cells_[next_ % kRingCells];
    const std::uint64_t sequence = next_ + 1;
    std::uint64_t cell = next_;
    for (std::size_t done = kCellRoom; done < bytes; done += kCellRoom) {
      copy_bytes(cells_[++cell % kRingCells].room.data(), data + done,
                 std::min<std::size_t>(kCellRoom, bytes - done));
    }
    next_ = cell + 1;
    const std::size_t here = std::min<std::size_t>(bytes, kCellRoom);
    if (here > kFirstLine) {
      copy_bytes(first.room.data() + kFirstLine, data + kFirstLine, here - kFirstLine);
    }
    if (here >= kFirstLine) {
      std::memcpy(first.room.data(), data, kFirstLine);
    } else if (here > 0) {
      copy_bytes(first.room.data(), data, here);
    }
    first.label = {context, tag, bytes, offered ? 1U : 0U};
    std::atomic_ref(first.sequence).store(sequence, std::memory_order_release);
    hand_over(first);
  }

 private:
  Cell* cells_;
  const Rings::Progress* reader_;
  std::uint64_t next_ = 0;  // cells written
  std::uint64_t read_ = 0;  // cells known to have been read
};

// The reading end of a ring.
class Reader {
 public:
  Reader(const Rings& rings, std::size_t from, std::size_t to)
      : cells_(rings.cells(from, to)), front_(cells_), progress_(&rings.progress(from, to)) {}

  // Begins to fetch the next message's first cell, both lines of it at once.
  void prefetch() const {
    __builtin_prefetch(front_);
    __builtin_prefetch(front_->room.data() + kCellRoom - 1);
  }

  // The label of the next message; null where there is none.
  [[nodiscard]] const Label* front() const {
    const auto sequence = std::atomic_ref(front_->sequence).load(std::memory_order_acquire);
    return sequence == next_ + 1 ? &front_->label : nullptr;
  }

  // The first `bytes` bytes of the next message.
  void read(std::byte* memory, std::size_t bytes) const {
    if (bytes > 0) {
      copy_bytes(memory, front_->room.data(), std::min(bytes, kCellRoom));
    }
    std::uint64_t cell = next_;
    for (std::size_t done = kCellRoom; done < bytes; done += kCellRoom) {
      copy_bytes(memory + done, cells_[++cell % kRingCells].room.data(),
                 std::min(kCellRoom, bytes - done));
    }
  }

  // Gives the next message's cells back.
  void pop(std::size_t bytes) {
    next_ += cells_of(bytes);
    front_ = cells_ + next_ % kRingCells;
    if (next_ - told_ >= kTellEvery) {
      progress_->cells_read.store(next_, std::memory_order_release);
      told_ = next_;
    }
  }

 private:
  Cell* cells_;
  Cell* front_;  // the next message's first
  Rings::Progress* progress_;
  std::uint64_t next_ = 0;  // cells read
  std::uint64_t told_ = 0;  // cells the writer knows of
};

}  // namespace sluice::loopback
