#include "runtime/group/group_collective.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <string>

#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "comm/base/throw_error.hpp"
#include "schedules/plan/collectives.hpp"

namespace sluice {
namespace {

bool adds(CollectiveKind kind) {
  return kind == CollectiveKind::kSum || kind == CollectiveKind::kReduceScatter;
}

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  const std::less<> before;
  return before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}

void copy(std::span<const std::byte> from, std::span<std::byte> to) {
  std::copy(from.begin(), from.end(), to.begin());
}

template <typename T>
void add_values(std::byte* into, const std::byte* from, std::size_t bytes) {
  T* const sum = reinterpret_cast<T*>(into);
  const T* const term = reinterpret_cast<const T*>(from);
  for (std::size_t i = 0; i < bytes / sizeof(T); ++i) sum[i] += term[i];
}

// The sum of `terms(rank)` is in terms(0).
template <typename Terms>
void add_all(DType type, std::size_t ranks, std::size_t bytes, const Terms& terms) {
  add_leaves(ranks, [&](std::size_t into, std::size_t from) {
    if (type == DType::kF64) return add_values<double>(terms(into), terms(from), bytes);
    add_values<float>(terms(into), terms(from), bytes);
  });
}

}  // namespace

std::size_t GroupCollective::me() const { return at(group_.communicator().rank()); }
std::size_t GroupCollective::ranks() const { return at(group_.communicator().size()); }

void GroupCollective::make(const CollectiveCall& call) {
  require_legal(call, ranks(), me());
  First mine{.made = {.bytes = call.in.size(),
                      .segments = call.segments,
                      .stage = call.stage,
                      .micro_batch = call.micro_batch,
                      .index = call.index,
                      .kind = call.kind,
                      .type = call.type}};
  const bool is_short = call.in.size() <= First::kValues;
  if (is_short) copy(call.in, mine.values);
  firsts_.resize(is_first() ? ranks() : 0);
  group_.gather(object_bytes(mine), std::as_writable_bytes(std::span(firsts_)), 0);
  if (is_first()) require_same();
  if (is_short) return make_short(call);
  group_.broadcast(object_bytes(mine.made), 0);  // they are the same
  make_long(call);
}

void GroupCollective::require_legal(const CollectiveCall& call, std::size_t count, std::size_t me) {
  const std::size_t in = call.in.size(), out = call.out.size();
  const bool splits =
      call.kind == CollectiveKind::kReduceScatter || call.kind == CollectiveKind::kAllToAll;
  const std::size_t legal = call.kind == CollectiveKind::kAllGather       ? in * count
                            : call.kind == CollectiveKind::kReduceScatter ? in / count
                                                                          : in;
  const bool cuts =
      call.kind == CollectiveKind::kAllGather || call.kind == CollectiveKind::kReduceScatter;
  if (call.segments == 0 || (call.segments > 1 && !cuts)) {
    throw_usage("{} in {} segments; legal: {}", name_of(call.kind), call.segments,
                cuts ? "1 or more" : "1");
  }
  const std::size_t unit = size_of(call.type) * (splits ? count : 1) * call.segments;
  if (in % unit != 0) {
    throw_usage("a rank passes {} bytes of {} for {} ranks in {} segments; legal: a multiple of {}",
                in, name_of(call.type), count, call.segments, unit);
  }
  if (out != legal) {
    throw_usage("{} bytes for {} ranks become {} there; legal: {}", in, count, out, legal);
  }
  const bool gathers = call.kind == CollectiveKind::kAllGather && call.segments == 1;
  const std::byte* const place = call.out.data() + (gathers ? me * in : 0);
  const bool in_place = (gathers || call.kind == CollectiveKind::kSum) && call.in.data() == place;
  if (!in_place && overlap(call.in, call.out)) {
    throw_usage("{} from and to memory that overlaps; legal: apart", name_of(call.kind));
  }
}

void GroupCollective::require_same() const {
  const auto text = [](const Made& made, bool place) {
    const std::string one = in_sentence(made.kind, made.bytes, made.type);
    const std::string segments =
        made.segments == 1 ? "" : fmt::format(" in {} segments", made.segments);
    return place ? fmt::format("{}{}, its collective {} in micro-batch {} of stage {}", one,
                               segments, made.index + 1, made.micro_batch, made.stage)
                 : one;
  };
  const Made& first = firsts_.front().made;
  for (std::size_t r = 1; r < firsts_.size(); ++r) {
    const Made& made = firsts_[r].made;
    if (made == first) continue;
    const bool alike =
        made.kind == first.kind && made.bytes == first.bytes && made.type == first.type;
    throw_error(ErrorCode::kMismatch, "{0} {1} makes {2}, {0} 0 {3}; legal: the same on all",
                member_, r, text(made, alike), text(first, alike));
  }
}

std::size_t GroupCollective::common_bytes(CollectiveKind kind, std::size_t bytes,
                                          std::size_t ranks) {
  return adds(kind) ? bytes : bytes * ranks;
}

GroupCollective::Parts GroupCollective::parts_of(CollectiveKind kind, DType type, std::size_t bytes,
                                                 std::size_t ranks) {
  const std::size_t halves_of_sum = type == DType::kF32 ? 1 : 2;
  switch (kind) {
    case CollectiveKind::kSum:
      return {round_up(bytes / ranks + (bytes % ranks > 0 ? 1 : 0), sizeof(double)), halves_of_sum};
    case CollectiveKind::kReduceScatter:
      return {bytes / ranks, halves_of_sum};
    case CollectiveKind::kAllGather:
      return {round_up(bytes, sizeof(float)), 1};
    case CollectiveKind::kAllToAll:
      break;
  }
  return {bytes / ranks, 2};
}

void GroupCollective::Memory::raise(const PlannedCollective& collective, std::size_t ranks) {
  const std::size_t bytes = collective.bytes;
  firsts = ranks * sizeof(First);
  if (bytes <= First::kValues) {
    common = std::max(common, common_bytes(collective.kind, bytes, ranks));
    return;
  }
  const Parts parts = parts_of(collective.kind, collective.type, bytes, ranks);
  const std::size_t half = multiply_bytes(parts.part, ranks);
  buffer = std::max(buffer, multiply_bytes(half, parts.halves));
  if (adds(collective.kind) && collective.type == DType::kF32) {
    summed = std::max(summed, half / sizeof(float));
  }
}

template <typename Piece>
void GroupCollective::for_pieces(const CollectiveCall& call, std::size_t part,
                                 const Piece& piece) const {
  const std::size_t bytes = part / call.segments;
  if (bytes == 0) return;
  for (std::size_t segment = 0; segment < call.segments; ++segment) {
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
      piece(rank, segment * bytes, (segment * ranks() + rank) * bytes, bytes);
    }
  }
}

void GroupCollective::make_short(const CollectiveCall& call) {
  const std::size_t bytes = call.in.size(), part = bytes / ranks();
  common_.resize(common_bytes(call.kind, bytes, ranks()));
  if (is_first() && adds(call.kind)) {
    add_all(call.type, ranks(), bytes, [&](std::size_t r) { return firsts_[r].values.data(); });
  }
  for (std::size_t r = 0; is_first() && r * bytes < common_.size(); ++r) {
    std::copy_n(firsts_[r].values.begin(), bytes, common_.data() + r * bytes);
  }
  group_.broadcast(common_, 0);
  const std::span<const std::byte> all(common_);
  switch (call.kind) {
    case CollectiveKind::kSum:
      return copy(all, call.out);
    case CollectiveKind::kAllGather:
      return for_pieces(call, bytes, [&](auto rank, auto of_part, auto of_all, auto size) {
        copy(all.subspan(rank * bytes + of_part, size), call.out.subspan(of_all));
      });
    case CollectiveKind::kReduceScatter:
      return for_pieces(call, part, [&](auto rank, auto of_part, auto of_all, auto size) {
        if (rank == me()) copy(all.subspan(of_all, size), call.out.subspan(of_part));
      });
    case CollectiveKind::kAllToAll:
      for (std::size_t r = 0; r < ranks(); ++r) {
        copy(all.subspan(r * bytes + me() * part, part), call.out.subspan(r * part));
      }
  }
}

void GroupCollective::make_long(const CollectiveCall& call) {
  const std::size_t bytes = call.in.size();
  const Parts parts = parts_of(call.kind, call.type, bytes, ranks());
  renew_buffer(parts);
  switch (call.kind) {
    case CollectiveKind::kSum:
      sum_parts(call, parts.part);
      group_.all_gather_parts(floats(), ends_, buffer_);
      return copy(buffer(0).first(bytes), call.out);
    case CollectiveKind::kReduceScatter:
      sum_parts(call, parts.part);
      return copy(buffer(0).subspan(me() * call.out.size(), call.out.size()), call.out);
    case CollectiveKind::kAllGather:
      copy(call.in, buffer(0).subspan(me() * parts.part));
      group_.all_gather_parts(floats(), ends_, buffer_);
      return for_pieces(call, bytes, [&](auto rank, auto of_part, auto of_all, auto size) {
        copy(buffer(0).subspan(rank * parts.part + of_part, size), call.out.subspan(of_all));
      });
    case CollectiveKind::kAllToAll:
      copy(call.in, buffer(0));
      group_.all_to_all(buffer(0), buffer(1), buffer_);
      copy(buffer(1), call.out);
  }
}

// The sum of this rank's part is at its place in the first half.
void GroupCollective::sum_parts(const CollectiveCall& call, std::size_t part) {
  if (call.kind == CollectiveKind::kSum) {
    copy(call.in, buffer(0));
    std::fill(buffer(0).begin() + static_cast<std::ptrdiff_t>(call.in.size()), buffer(0).end(),
              std::byte{});
  } else {
    for_pieces(call, part, [&](auto rank, auto of_part, auto of_all, auto size) {
      copy(call.in.subspan(of_all, size), buffer(0).subspan(rank * part + of_part));
    });
  }
  if (call.type == DType::kF32) return group_.ordered_reduce_scatter(floats(), ends_, buffer_);
  const std::span<std::byte> terms = buffer(1);
  group_.all_to_all(buffer(0), terms, buffer_);
  add_all(call.type, ranks(), part, [&](std::size_t r) { return terms.data() + r * part; });
  copy(terms.first(part), buffer(0).subspan(me() * part));
}

void GroupCollective::renew_buffer(const Parts& parts) {
  half_ = parts.part * ranks();
  if (buffer_.use_count() > 1 || buffer_->size() < parts.halves * half_) {
    buffer_ = std::make_shared<std::vector<std::byte>>(parts.halves * half_);
  }
  ends_.resize(ranks());
  for (std::size_t r = 0; r < ranks(); ++r) ends_[r] = (r + 1) * parts.part / sizeof(float);
}

std::span<std::byte> GroupCollective::buffer(std::size_t half) const {
  return std::span(*buffer_).subspan(half * half_, half_);
}

std::span<float> GroupCollective::floats() const {
  return {reinterpret_cast<float*>(buffer_->data()), half_ / sizeof(float)};
}

}  // namespace sluice
