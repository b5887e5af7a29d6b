// The data movement of the emulated NCCL.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/emulated_cuda/clique.hpp"

namespace sluice::emulated {

namespace {

// Elements as they are stored and as they are added.
template <typename T>
struct Plain {
  using Stored = T;
  using Sum = T;
  static Sum load(Stored value) { return value; }
  static Stored store(Sum value) { return value; }
};

struct Bf16 {
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored value) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
  }
  static Stored store(Sum value) {
    auto bits = std::bit_cast<std::uint32_t>(value);
    bits = std::isnan(value) ? bits | 0x400000U : bits + 0x7FFFU + (bits >> 16 & 1U);
    return static_cast<Stored>(bits >> 16);
  }
};

template <typename Sum>
Sum reduced(ncclRedOp_t reduction, Sum a, Sum b) {
  switch (reduction) {
    case ncclProd:
      return static_cast<Sum>(a * b);
    case ncclMax:
      return a < b ? b : a;
    case ncclMin:
      return b < a ? b : a;
    default:
      return static_cast<Sum>(a + b);
  }
}

// Elements [first, first + count) of all ranks' sources, in ascending order of ranks.
template <typename Element>
std::vector<typename Element::Stored> reduce(const std::vector<const Operation*>& match,
                                             std::size_t first, std::size_t count) {
  using Sum = typename Element::Sum;
  std::vector<typename Element::Stored> result(count);
  for (std::size_t i = 0; i < count; ++i) {
    Sum sum{};
    for (const Operation* operation : match) {
      const auto* source = static_cast<const typename Element::Stored*>(operation->source);
      const Sum value = Element::load(source[first + i]);
      sum = operation == match.front() ? value : reduced(operation->reduction, sum, value);
    }
    if (match.front()->reduction == ncclAvg)
      sum = static_cast<Sum>(sum / static_cast<Sum>(match.size()));
    result[i] = Element::store(sum);
  }
  return result;
}

template <typename Element>
void reduce_to_targets(const std::vector<const Operation*>& match) {
  const Operation& any = *match.front();
  const bool scatters = any.kind == OperationKind::kReduceScatter;
  const std::size_t count = scatters ? any.count * match.size() : any.count;
  // Complete before anything is written: a target may be a source.
  const auto result = reduce<Element>(match, 0, count);
  for (std::size_t rank = 0; rank < match.size(); ++rank) {
    const std::size_t first = scatters ? rank * any.count : 0;
    std::memcpy(match[rank]->target, result.data() + first,
                any.count * sizeof(typename Element::Stored));
  }
}

void reduce_by_type(const std::vector<const Operation*>& match) {
  switch (match.front()->type) {
    case ncclInt8:
      return reduce_to_targets<Plain<std::int8_t>>(match);
    case ncclUint8:
      return reduce_to_targets<Plain<std::uint8_t>>(match);
    case ncclInt32:
      return reduce_to_targets<Plain<std::int32_t>>(match);
    case ncclUint32:
      return reduce_to_targets<Plain<std::uint32_t>>(match);
    case ncclInt64:
      return reduce_to_targets<Plain<std::int64_t>>(match);
    case ncclUint64:
      return reduce_to_targets<Plain<std::uint64_t>>(match);
    case ncclFloat32:
      return reduce_to_targets<Plain<float>>(match);
    case ncclFloat64:
      return reduce_to_targets<Plain<double>>(match);
    case ncclBfloat16:
      return reduce_to_targets<Bf16>(match);
    default:
      return;  // refused where it was issued
  }
}

}  // namespace

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

void carry_out(const std::vector<const Operation*>& match) {
  const Operation& first = *match.front();
  const std::size_t bytes = first.count * size_of(first.type);
  if (bytes == 0) return;
  switch (first.kind) {
    case OperationKind::kSend:
      std::memcpy(match.back()->target, first.source, bytes);
      break;
    case OperationKind::kBroadcast: {
      const void* source = match[static_cast<std::size_t>(first.peer)]->source;
      for (const Operation* operation : match) std::memmove(operation->target, source, bytes);
      break;
    }
    case OperationKind::kAllGather:
      for (const Operation* to : match) {
        for (std::size_t rank = 0; rank < match.size(); ++rank) {
          std::memmove(static_cast<char*>(to->target) + rank * bytes, match[rank]->source, bytes);
        }
      }
      break;
    case OperationKind::kAllReduce:
    case OperationKind::kReduceScatter:
      reduce_by_type(match);
      break;
    case OperationKind::kReceive:
      break;  // never first
  }
}

}  // namespace sluice::emulated
