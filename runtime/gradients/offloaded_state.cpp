#include "runtime/gradients/offloaded_state.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/threads.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/group/activity.hpp"

namespace sluice {
namespace {

// While one piece is updated others move; two calls of the system at a time keep a disk busy.
constexpr std::size_t kSlots = 4, kThreads = 2;
constexpr std::size_t kPage = ScratchFile::kAlignment;

Buffer page_memory(std::size_t bytes) { return Buffer(Device{}, bytes + kPage); }

std::byte* first_page(const Buffer& buffer) {
  const auto address = reinterpret_cast<std::uintptr_t>(buffer.data());
  return buffer.data() + (round_up(address, kPage) - address);
}

}  // namespace

OffloadedState::Sizes OffloadedState::Sizes::of(const OptimizerConfig& config, std::size_t bytes,
                                                std::size_t pool) {
  const std::size_t kinds = state_kinds(config);
  return {.kinds = kinds, .bytes = kinds == 0 ? 0 : bytes / kinds, .pool = pool};
}

std::size_t OffloadedState::Sizes::piece() const {
  if (kinds == 0) return 0;
  const std::size_t most = pool / (kSlots * kinds);
  const std::size_t grain = most < ScratchFile::kPiece ? kPage : ScratchFile::kPiece;
  return std::min(std::max(most / grain * grain, kPage), vector());
}

std::size_t OffloadedState::Sizes::unit() const { return std::min(piece(), ScratchFile::kPiece); }

std::size_t OffloadedState::Sizes::pieces() const {
  return bytes == 0 ? 0 : (bytes - 1) / piece() + 1;
}

std::size_t OffloadedState::Sizes::slots() const { return std::min(kSlots, pieces()); }

std::size_t OffloadedState::Sizes::vector() const { return round_up(bytes, kPage); }

OffloadedState::Vector::Vector(const Sizes& sizes, const PipelineOptions::Offload& offload)
    : file(offload.directory, offload.optimizer == PipelineOptions::Offload::To::kCachedDisk,
           sizes.vector(), sizes.unit()),
      written((sizes.vector() - 1) / sizes.unit() + 1) {}

OffloadedState::OffloadedState(const Sizes& sizes, const PipelineOptions::Offload& offload,
                               Interrupt* interrupt, const ActivityBoard* board)
    : sizes_(sizes),
      interrupt_(interrupt),
      board_(board),
      waiter_(std::numeric_limits<int>::max()),
      addresses_(sizes.disk()),
      memory_(page_memory(sizes.memory())),
      slots_(sizes.slots()) {
  if (sizes.kinds == 0 || sizes.kinds > kMostKinds) {
    throw_error(ErrorCode::kInternal, "state of {} kinds is offloaded", sizes.kinds);
  }
  for (std::size_t kind = 0; kind < sizes.kinds; ++kind) {
    vectors_.emplace_back(sizes, offload);
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      slots_[i].memory[kind] = first_page(memory_) + (i * sizes.kinds + kind) * sizes.piece();
    }
  }
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads_.push_back(start_thread<std::jthread>(
        "offloaded state", [this](const std::stop_token& stop) { run(stop); }));
  }
}

std::size_t OffloadedState::take(std::size_t bytes) {
  if (bytes > sizes_.bytes - taken_) {
    throw_error(ErrorCode::kInternal, "{} bytes of state after {} of {}", bytes, taken_,
                sizes_.bytes);
  }
  taken_ += bytes;
  return taken_ - bytes;
}

void OffloadedState::visit(std::size_t begin, std::size_t end, const Visit& each) {
  wait_for_accesses();
  std::array<std::byte*, kMostKinds> memory = {};
  while (begin < end) {
    const std::size_t piece = begin / sizes_.piece(), start = piece * sizes_.piece();
    const std::size_t piece_end = std::min(start + sizes_.piece(), sizes_.bytes);
    const std::size_t until = std::min(end, piece_end);
    Slot& slot = bring(piece);
    for (std::size_t kind = 0; kind < sizes_.kinds; ++kind) {
      memory[kind] = slot.memory[kind] + (begin - start);
    }
    each(begin, until, std::span(memory).first(sizes_.kinds));
    if (until == piece_end) {
      const std::size_t reads = (piece + slots_.size()) % sizes_.pieces();
      ask(slot, piece, reads == piece ? kNone : reads);  // it has that one
      ++next_;
    }
    begin = until;
  }
}

void OffloadedState::wait_for_accesses() {
  while (accesses_ > 0) {
    const std::uint64_t moved = moved_;  // a wait that goes on is none that hangs
    wait_until(waiter_, interrupt_, {.what = WaitSubject::What::kSave},
               [&] { return accesses_ == 0 || moved_ != moved; });
  }
}

OffloadedState::Slot& OffloadedState::bring(std::size_t piece) {
  if (!ahead_) {
    for (std::size_t i = 0; i < slots_.size(); ++i) ask(slots_[i], kNone, i);
    ahead_ = true;
    next_ = 0;
  }
  if (next_ % sizes_.pieces() != piece) {
    throw_error(ErrorCode::kInternal, "piece {} of the state is updated after {} of {}", piece,
                next_, sizes_.pieces());
  }
  Slot& slot = slots_[next_ % slots_.size()];
  wait([&] { return slot.state == Slot::State::kIdle; });
  return slot;
}

void OffloadedState::ask(Slot& slot, std::size_t writes, std::size_t reads) {
  const std::unique_lock lock(mutex_);
  slot.state = Slot::State::kAsked;
  slot.order = ++asked_;
  slot.writes = writes;
  slot.reads = reads;
  more_.notify_one();
}

void OffloadedState::run(const std::stop_token& stop) {
  // What it reads is written first.
  const auto waits = [&](const Slot& slot) {
    return slot.reads != kNone && std::ranges::any_of(slots_, [&](const Slot& each) {
             return each.state != Slot::State::kIdle && each.order < slot.order &&
                    each.writes == slot.reads;
           });
  };
  // The one that was asked first, whose content is needed first.
  const auto next = [&]() -> Slot* {
    Slot* first = nullptr;
    for (Slot& each : slots_) {
      if (each.state != Slot::State::kAsked || waits(each)) continue;
      if (first == nullptr || each.order < first->order) first = &each;
    }
    return first;
  };
  try {
    for (std::unique_lock lock(mutex_);;) {
      if (!more_.wait(lock, stop, [&] { return next() != nullptr; })) return;
      Slot& slot = *next();
      slot.state = Slot::State::kMoves;
      lock.unlock();
      make(slot);
      lock.lock();
      slot.state = Slot::State::kIdle;
      more_.notify_all();  // who waits for what it wrote
    }
  } catch (...) {
    const std::unique_lock lock(mutex_);
    failure_ = std::current_exception();
  }
}

void OffloadedState::make(const Slot& slot) {
  const std::size_t units = sizes_.piece() / sizes_.unit();
  for (const bool writes : {true, false}) {
    const std::size_t piece = writes ? slot.writes : slot.reads;
    if (piece == kNone) continue;
    for (std::size_t kind = 0; kind < sizes_.kinds; ++kind) {
      for (std::size_t begin = 0; begin < sizes_.piece(); begin += sizes_.unit()) {
        if (piece * sizes_.piece() + begin >= sizes_.vector()) break;
        move_unit(kind, piece * units + begin / sizes_.unit(), slot.memory[kind] + begin, writes);
      }
    }
  }
}

void OffloadedState::move_unit(std::size_t kind, std::size_t number, std::byte* memory,
                               bool writes) {
  Vector& vector = vectors_[kind];
  const std::size_t begin = number * sizes_.unit();
  const std::span<std::byte> bytes(memory, std::min(sizes_.unit(), sizes_.vector() - begin));
  if (writes) {
    vector.file.write(begin, bytes);
    vector.written[number] = 1;
  } else if (vector.written[number] != 0) {
    vector.file.read(begin, bytes);
  } else {
    std::ranges::fill(bytes, std::byte{});
  }
}

template <typename Done>
void OffloadedState::wait(const Done& done) {
  wait_until(waiter_, interrupt_, {.what = WaitSubject::What::kStore}, [&] {
    const std::unique_lock lock(mutex_);
    if (failure_ != nullptr) fail();
    return done();
  });
}

void OffloadedState::wait_until_written() {
  wait([&] {
    return std::ranges::all_of(slots_,
                               [](const Slot& each) { return each.state == Slot::State::kIdle; });
  });
}

void OffloadedState::fail() const {
  try {
    std::rethrow_exception(failure_);
  } catch (const Error& error) {
    const std::uint64_t saved = board_ == nullptr ? 0 : board_->saved_plus_one();
    throw_error(error.code(),
                "{}; the optimizer's state is lost, and an update may be half made: {}",
                error.what(),
                saved == 0 ? "there is no save to go on from"
                           : fmt::format("go on from the save of step {}", saved - 1));
  }
}

OffloadedState::Access::Access(OffloadedState& state, Use use)
    : state_(state), memory_(page_memory(state.sizes_.access())), units_(state.sizes_.kinds) {
  state.wait_until_written();
  for (std::size_t kind = 0; kind < units_.size(); ++kind) {
    units_[kind].memory = first_page(memory_) + kind * state.sizes_.unit();
  }
  if (use == Use::kWrites) {
    state.wait_for_accesses();
    state.ahead_ = false;
  }
  ++state.accesses_;
}

OffloadedState::Access::~Access() { --state_.accesses_; }

template <typename Each>
void OffloadedState::Access::in_units(const std::byte* address, std::size_t bytes,
                                      const Each& each) {
  const Sizes& sizes = state_.sizes_;
  const auto offset = static_cast<std::size_t>(address - state_.addresses_.data());
  const std::size_t kind = offset / sizes.vector();
  std::size_t begin = offset % sizes.vector();
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t within = begin % sizes.unit();
    const std::size_t count = std::min(bytes - done, sizes.unit() - within);
    bring(kind, begin / sizes.unit());
    each(units_[kind], units_[kind].memory + within, done, count);
    done += count;
    begin += count;
  }
}

void OffloadedState::Access::bring(std::size_t kind, std::size_t number) {
  Unit& unit = units_[kind];
  if (unit.number == number) return;
  flush(kind);
  unit.number = SIZE_MAX;  // if it throws
  state_.move_unit(kind, number, unit.memory, /*writes=*/false);
  unit.number = number;
  ++state_.moved_;
}

void OffloadedState::Access::flush(std::size_t kind) {
  Unit& unit = units_[kind];
  if (!std::exchange(unit.changed, false)) return;
  state_.move_unit(kind, unit.number, unit.memory, /*writes=*/true);
  ++state_.moved_;
}

void OffloadedState::Access::read(const std::byte* address, std::span<std::byte> into) {
  in_units(address, into.size(),
           [&](const Unit&, const std::byte* memory, std::size_t done, std::size_t count) {
             std::memcpy(into.data() + done, memory, count);
           });
}

void OffloadedState::Access::write(const std::byte* address, std::span<const std::byte> from) {
  in_units(address, from.size(),
           [&](Unit& unit, std::byte* memory, std::size_t done, std::size_t count) {
             std::memcpy(memory, from.data() + done, count);
             unit.changed = true;
           });
}

void OffloadedState::Access::flush() {
  for (std::size_t kind = 0; kind < units_.size(); ++kind) flush(kind);
}

}  // namespace sluice
