#include "runtime/planning/same_stages.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/sha256.hpp"

namespace sluice {
namespace {

// A line per parameter, buffer and collective; entry_text(entry) is what is compared of the former,
// next to its name and its unit. `axis`: of those that are compared.
template <typename EntryText>
std::string list(const std::vector<StageEntry>& stages, CollectiveAxis axis,
                 const EntryText& entry_text) {
  std::string all;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const auto add = [&](const std::vector<ParameterEntry>& entries, std::string_view what) {
      for (std::size_t i = 0; i < entries.size(); ++i) {
        all += fmt::format("{} {} of stage {}: {}, {}{}\n", what, i, s, entries[i].name,
                           entry_text(entries[i]),
                           what == "buffer" ? "" : fmt::format(", unit {}", entries[i].unit));
        if (entries[i].copied) all.insert(all.size() - 1, ", with a copy in bf16");
      }
      all += fmt::format("stage {} of {} {}s\n", s, entries.size(), what);
    };
    if (stages[s].uses_units) all += fmt::format("stage {} uses its parameters by units\n", s);
    if (!stages[s].weight_reads)
      all += fmt::format("stage {} reads none for weight gradients\n", s);
    add(stages[s].parameters, "parameter");
    add(stages[s].buffers, "buffer");
    const auto add_collectives = [&](const std::vector<PlannedCollective>& made,
                                     const char* where) {
      for (const PlannedCollective& each : made) {
        // Groups along the other axis may have other parts.
        all += each.axis == axis ? to_string(each)
                                 : fmt::format("{} of {} over {}", name_of(each.kind),
                                               name_of(each.type), name_of(each.axis));
        all += fmt::format(" in the {} of stage {}\n", where, s);
      }
      all += fmt::format("stage {} of {} collectives in its {}\n", s, made.size(), where);
    };
    add_collectives(stages[s].collectives.forward, "forward");
    add_collectives(stages[s].collectives.loss, "loss");
    add_collectives(stages[s].collectives.backward_input, "input gradient");
    add_collectives(stages[s].collectives.backward_weight, "weight gradient");
    add_collectives(stages[s].collectives.recompute, "recomputation");
  }
  return all;
}

std::string shares_text(const ParameterEntry& entry) {
  return entry.shares == 0 ? "" : fmt::format(", gradient in {} shares", entry.shares);
}

std::string rows_text(std::size_t tensor, const Slice& slice) {
  return slice.length == 0 ? fmt::format("tensor rank {} has none", tensor)
                           : fmt::format("tensor rank {} has {} to {}", tensor, slice.begin,
                                         slice.begin + slice.length - 1);
}

// `parts`: of all tensor ranks, which may have them in any order.
void require_parts(std::vector<Slice> parts, const ParameterEntry& entry, std::string_view what,
                   std::size_t stage) {
  const std::int64_t whole = parts.front().whole;
  std::erase_if(parts, [](const Slice& part) { return part.length == 0; });
  std::ranges::sort(parts, {}, &Slice::begin);
  parts.push_back({.begin = whole});
  std::int64_t end = 0;
  for (const Slice& part : parts) {
    if (part.begin != end) {
      throw_usage(
          "{} '{}' of stage {}, {}: rows {} to {} of dimension {} are {} in the parts of shards; "
          "legal: each of the {} rows in one part of one tensor rank",
          what, entry.name, stage, entry.use, std::min(part.begin, end),
          std::max(part.begin, end) - 1, entry.slice.axis,
          part.begin > end ? "missing" : "there twice", whole);
    }
    end += part.length;
  }
}

// `slices`: [tensor coordinate] of one parameter.
void require_whole(const std::vector<Slice>& slices, const ParameterEntry& entry,
                   std::string_view what, std::size_t stage) {
  const std::int64_t whole = slices.front().whole;
  std::int64_t end = 0;
  std::vector<std::string> ranks;
  std::string fault;
  for (std::size_t t = 0; t <= slices.size(); ++t) {
    const bool none = t < slices.size() && slices[t].length == 0;
    const std::int64_t begin = none ? end : t < slices.size() ? slices[t].begin : whole;
    if (fault.empty() && begin != end) {
      fault = fmt::format("rows {} to {} of dimension {} are {}", std::min(begin, end),
                          std::max(begin, end) - 1, slices.front().axis,
                          begin > end ? "missing" : "there twice, or in another order");
    }
    if (t == slices.size()) break;
    end = begin + slices[t].length;
    ranks.push_back(rows_text(t, slices[t]));
  }
  if (fault.empty()) return;
  throw_usage(
      "{} '{}' of stage {}, {}: {}; {}; legal: each of the {} rows on one tensor rank, in their "
      "order, as StagePlace::slice() cuts them",
      what, entry.name, stage, entry.use, fault, joined(ranks, ", "), whole);
}

}  // namespace

void require_same_texts(const std::vector<std::string>& texts, std::string_view member) {
  const auto first =
      std::find_if(texts.begin(), texts.end(), [](const auto& text) { return !text.empty(); });
  for (auto other = first; other != texts.end(); ++other) {
    if (other->empty() || *other == *first) continue;
    std::istringstream ours(*first), theirs(*other);
    std::string one, two;
    do {
      one.clear();
      two.clear();
      std::getline(ours, one);
      std::getline(theirs, two);
    } while (one == two && ours && theirs);
    throw_error(ErrorCode::kMismatch,
                "{0}s disagree about the model: {0} {1} has '{2}', {0} {3} has '{4}'", member,
                first - texts.begin(), one, other - texts.begin(), two);
  }
}

void require_same_replicas(Collectives& replicas, const std::vector<StageEntry>& stages) {
  if (replicas.communicator().size() == 1) return;
  const std::string mine = list(stages, CollectiveAxis::kReplica, [](const ParameterEntry& entry) {
    return fmt::format("{} elements{}{}", entry.elements, cut_text(entry), shares_text(entry));
  });
  const std::string digest = sha256_hex(std::as_bytes(std::span<const char>(mine)));
  std::string all(digest.size() * at(replicas.communicator().size()), '\0');
  replicas.all_gather(std::as_bytes(std::span<const char>(digest)),
                      std::as_writable_bytes(std::span<char>(all)));
  for (std::size_t i = 0; i < all.size(); i += digest.size()) {
    if (all.compare(i, digest.size(), digest) == 0) continue;
    require_same_texts(replicas.all_gather_strings(mine), "replica");
  }
}

void require_parts_of_whole(std::span<const ParameterTable> tensor_ranks) {
  std::vector<std::string> texts;
  for (const ParameterTable& table : tensor_ranks) {
    texts.push_back(list(table.stages, CollectiveAxis::kTensor, [](const ParameterEntry& entry) {
      return entry.use + (entry.tied ? ", tied" : "") + shares_text(entry) +
             (entry.slice.all() ? "" : fmt::format(", cut along dimension {}", entry.slice.axis));
    }));
  }
  require_same_texts(texts, "tensor rank");
  const std::vector<StageEntry>& stages = tensor_ranks.front().stages;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const auto check = [&](std::vector<ParameterEntry> StageEntry::*entries,
                           std::string_view what) {
      for (std::size_t i = 0; i < (stages[s].*entries).size(); ++i) {
        const ParameterEntry& first = (stages[s].*entries)[i];
        if (tensor_ranks.size() > 1 && (first.shares & (first.shares - 1)) != 0) {
          throw_usage(
              "{} '{}' of stage {} has {} shares of its gradient on each of {} ranks; legal: a "
              "power of two",
              what, first.name, s, first.shares, tensor_ranks.size());
        }
        if (first.slice.all()) continue;
        std::vector<Slice> slices, all;
        bool in_parts = false;
        for (const ParameterTable& table : tensor_ranks) {
          const ParameterEntry& entry = (table.stages[s].*entries)[i];
          slices.push_back(entry.slice);
          for (const PlacedPart& part : entry.placed()) all.push_back(part.slice);
          in_parts = in_parts || !entry.parts.empty();
        }
        if (in_parts) {
          require_parts(std::move(all), first, what, s);
        } else {
          require_whole(slices, first, what, s);
        }
      }
    };
    check(&StageEntry::parameters, "parameter");
    check(&StageEntry::buffers, "buffer");
  }
}

}  // namespace sluice
