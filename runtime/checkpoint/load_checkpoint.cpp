#include "runtime/checkpoint/load_checkpoint.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>

#include <sluice/checkpoint.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/program_state.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/save_state.hpp"
#include "runtime/checkpoint/saved_tensors.hpp"
#include "runtime/checkpoint/state_parts.hpp"
#include "runtime/checkpoint/verify.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/gradients/offloaded_state.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/layout/save_shares.hpp"
#include "runtime/pipeline/call.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/weights/weights.hpp"
#include "stages/tensor/slice_runs.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;
// The model's parameters are exactly those that were saved, with these sizes. One host's directory
// may lack those of other hosts' ranks; require_tensors() finds what this rank lacks.
void require_fitting(const SavedTensors& saved, const JobLayout& layout, const fs::path& path) {
  std::set<std::string> known;
  for (const SavedParameter& parameter : share_saves(layout)) {
    known.insert(parameter.name);
    const std::optional<TensorSpec> tensor = saved.find(parameter.name);
    if (tensor && tensor->shape.elements() == parameter.elements) continue;
    if (!tensor && saved.local()) continue;
    throw_error(ErrorCode::kWeights,
                "weights in '{}' do not fit the model: tensor '{}' {}, but the model needs {} "
                "elements",
                path.string(), parameter.name,
                tensor ? fmt::format("was saved as {}", to_string(*tensor)) : "is missing",
                parameter.elements);
  }
  for (const std::string& name : saved.parameters()) {
    if (known.contains(name)) continue;
    throw_error(ErrorCode::kWeights,
                "weights in '{}' do not fit the model: it has no parameter '{}' (is it a save "
                "of another model?)",
                path.string(), name);
  }
}

// What this rank reads: elements of a slice of a saved tensor, which go into this rank's memory.
struct Wanted {
  std::string name;
  TensorSpec spec;  // of the whole
  Tensor into;
  Slice slice = {};
  std::int64_t first = 0;
  const Parameter* parameter = nullptr;  // whose value it is; null: no parameter's
};

// Collective.
std::vector<Wanted> wanted(Pipeline& pipeline, bool optimizer) {
  std::vector<Wanted> all;
  const auto add = [&](const Pipeline::Owned& owned) {
    const Parameter& parameter = *owned.parameter;
    const TensorSpec whole{parameter.value.spec.dtype, parameter.whole_shape()};
    for (const PlacedPart& part :
         placed_parts(parameter.slice, parameter.parts, parameter.shape.elements())) {
      all.push_back({parameter.name, whole, elements_of(parameter.value, {part.first, part.count}),
                     part.slice, 0, &parameter});
    }
  };
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    if (owned.owner) add(owned);
  }
  for (const Pipeline::Owned& owned : pipeline.buffers()) add(owned);
  on_all_ranks(PipelineAccess::world(pipeline), [&] {
    if (!optimizer) return;
    for (const StatePart& part : state_parts(pipeline)) {
      const TensorSpec whole{part.tensor.spec.dtype, part.shape};
      all.push_back({part.name, whole, part.tensor, part.slice, part.first});
    }
  });
  return all;
}

// Every tensor that this rank reads is there with its shape, and its type unless it is a model's,
// which may be saved in another one, or `state` lets it be converted.
void require_tensors(const SavedTensors& saved, std::span<const Wanted> tensors,
                     OtherPrecision state, const fs::path& path) {
  const std::vector<std::string> names = saved.parameters();
  const auto is_moment = [](DType type) { return type == DType::kF32 || type == DType::kBf16; };
  for (const Wanted& each : tensors) {
    const std::optional<TensorSpec> tensor = saved.find(each.name);
    const bool model = std::binary_search(names.begin(), names.end(), each.name);
    const DType needed = each.spec.dtype;
    const bool fits = tensor && tensor->shape == each.spec.shape;
    if (fits && (model || tensor->dtype == needed)) continue;
    const bool converts = fits && is_moment(tensor->dtype) && is_moment(needed);
    if (converts && state == OtherPrecision::kConvert) continue;
    if (converts) {
      throw_error(ErrorCode::kWeights,
                  "weights in '{}' do not fit the run: the optimizer's state '{}' was saved in {}, "
                  "but the run keeps it in {}; leave --moment-precision as it was saved, or give "
                  "--change moment-precision (OtherPrecision::kConvert)",
                  path.string(), each.name, name_of(tensor->dtype), name_of(needed));
    }
    throw_error(ErrorCode::kWeights,
                "weights in '{}' do not fit the model: tensor '{}' {}, but the model needs it as "
                "{}",
                path.string(), each.name,
                tensor ? fmt::format("was saved as {}", to_string(*tensor)) : "is missing",
                to_string(each.spec));
  }
}

// State that is offloaded, in pieces.
void read_offloaded(OffloadedState::Access& state, SavedTensors& saved, const Wanted& of) {
  std::vector<float> values;
  std::vector<Bf16> rounded;
  for (std::int64_t done = 0; done < of.into.elements(); done += std::ssize(values)) {
    values.resize(static_cast<std::size_t>(
        std::min(SavedTensors::kPieceElements, of.into.elements() - done)));
    saved.read(of.name, values, of.first + done, of.slice);
    const auto* to = elements_of(of.into, {done, 0}).as<const std::byte>();
    if (of.spec.dtype != DType::kBf16) {
      state.write(to, std::as_bytes(std::span(values)));
      continue;
    }
    rounded.resize(values.size());
    std::ranges::transform(values, rounded.begin(), [](float value) { return to_bf16(value); });
    state.write(to, std::as_bytes(std::span(rounded)));
  }
}

void read_values(Pipeline& pipeline, SavedTensors& saved, std::span<const Wanted> tensors) {
  HostMirror mirror(pipeline.compute());
  OffloadedState* const offloaded = PipelineAccess::offloaded_state(pipeline);
  std::optional<OffloadedState::Access> state;
  std::vector<float> values;
  std::vector<SavedTensors::Share> shares;
  while (!tensors.empty()) {
    // The parts of a parameter or of a state lie one after the other.
    const Wanted& of = tensors.front();
    if (offloaded != nullptr && offloaded->has(of.into.data)) {
      if (!state) state.emplace(*offloaded, OffloadedState::Access::Use::kWrites);
      read_offloaded(*state, saved, of);
      tensors = tensors.subspan(1);
      continue;
    }
    std::int64_t elements = 0;
    std::size_t parts = 0;
    for (; parts < tensors.size(); ++parts) {
      const Wanted& next = tensors[parts];
      if (next.name != of.name || next.into.data != elements_of(of.into, {elements, 0}).data) break;
      elements += next.into.elements();
    }
    const std::span<std::byte> bytes =
        mirror.writable_host_copy(elements_of(of.into, {0, elements}));
    const bool rounded = of.spec.dtype == DType::kBf16;  // state of an optimizer
    if (rounded) values.resize(static_cast<std::size_t>(elements));
    auto* to = rounded ? values.data() : reinterpret_cast<float*>(bytes.data());
    shares.clear();
    for (const Wanted& each : tensors.first(parts)) {
      const auto count = static_cast<std::size_t>(each.into.elements());
      shares.push_back({{to, count}, each.first, each.slice});
      to += count;
    }
    saved.read(of.name, shares);
    auto* rounds_to = reinterpret_cast<Bf16*>(bytes.data());
    for (std::size_t i = 0; rounded && i < values.size(); ++i) rounds_to[i] = to_bf16(values[i]);
    mirror.write_back();
    if (tensors.front().parameter != nullptr) {
      PipelineAccess::give_back(pipeline, *tensors.front().parameter);
    }
    tensors = tensors.subspan(parts);
  }
  if (state) state->flush();
  pipeline.compute().wait();  // before the mirror goes
}

// Collective over the job. Ranks that share a stage have read the same where they read a tensor
// whole: a directory without an id may hold other weights on another host.
void require_same_values(Pipeline& pipeline, std::span<const Wanted> tensors,
                         const fs::path& directory) {
  const RankPlace& place = PipelineAccess::layout(pipeline).place;
  const std::vector<int> ranks = place.topology.group(Axis::kTensor, place.here);
  if (ranks.size() == 1) return;
  HostMirror mirror(pipeline.compute());
  std::vector<const Wanted*> whole;
  std::string digests;
  for (const Wanted& each : tensors) {
    if (!each.slice.all()) continue;
    whole.push_back(&each);
    const bool value = each.parameter != nullptr;
    digests += sha256_hex(
        mirror.read_back(value ? PipelineAccess::at_rest(pipeline, *each.parameter) : each.into));
  }
  const std::vector<std::string> all =
      PipelineAccess::tensor_ranks(pipeline).all_gather_strings(digests);
  for (std::size_t other = 1; other < all.size(); ++other) {
    const auto differ = std::ranges::mismatch(all.front(), all[other]).in1;
    if (differ == all.front().end()) continue;
    const auto found = static_cast<std::size_t>(differ - all.front().begin());
    const std::vector<std::string>& hosts = PipelineAccess::hosts(pipeline);
    throw_error(
        ErrorCode::kWeights,
        "tensor '{}' in '{}' differs between rank {} on host '{}' and rank {} on host '{}', "
        "which share a stage: they do not see the same directory",
        whole[found * whole.size() / all.front().size()]->name, directory.string(), ranks.front(),
        hosts[at(ranks.front())], ranks[other], hosts[at(ranks[other])]);
  }
}

// What rank 0 found at a path, for all ranks.
struct Found {
  std::vector<std::pair<std::string, std::string>> candidates;  // directory, id of the save
  std::vector<std::string> broken;
  bool one_step = false;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Found, candidates, broken, one_step)

// With `resumable`, exports are no candidates where there are other saves.
Found find_saves(Collectives& world, const fs::path& path, bool resumable) {
  std::string text;
  on_all_ranks(world, [&] {
    if (world.communicator().rank() != 0) return;
    const SaveSelection selection = select_saves(path);
    const bool exports_alone =
        selection.candidates.empty() || newest_resumable(selection).state.weights_only;
    Found found;
    for (const Save& save : selection.candidates) {
      if (resumable && save.state.weights_only && !exports_alone) continue;
      found.candidates.emplace_back(save.directory.string(), save.state.save);
    }
    found.broken = selection.broken;
    found.one_step = selection.one_step;
    text = to_cbor(found);  // paths may not be UTF-8
  });
  return from_cbor(world.broadcast_string(text, 0)).get<Found>();
}

// The pieces that this rank hashes: ranks that see the same files share them.
std::vector<HashPiece> my_pieces(Collectives& world, const fs::path& directory,
                                 const SaveState& state, std::span<const SavedTensor> tensors,
                                 const std::vector<std::string>& hosts, Verify verify) {
  if (verify == Verify::kRead) {
    std::set<std::string> names;
    for (const SavedTensor& tensor : tensors) names.insert(tensor.name);
    return hash_pieces_of(directory, state, names);
  }
  const int rank = world.communicator().rank();
  const bool local = state.layout.contains("local");
  std::size_t sharers = 0, mine = 0;
  for (std::size_t other = 0; other < hosts.size(); ++other) {
    if (local && hosts[other] != hosts[at(rank)]) continue;
    if (static_cast<int>(other) == rank) mine = sharers;
    ++sharers;
  }
  const std::vector<HashPiece> all = hash_pieces(state);
  // Contiguous: a rank reads few files, each in order.
  const auto bound = [&](std::size_t share) {
    return static_cast<std::ptrdiff_t>(all.size() * share / sharers);
  };
  return {all.begin() + bound(mine), all.begin() + bound(mine + 1)};
}

// The files' tensors that `tensors` are read from: a model's, and its f32 values beside them.
std::vector<SavedTensor> tensors_of(std::span<const Wanted> tensors, const fs::path& directory,
                                    const SaveState& state) {
  std::vector<SavedTensor> all;
  SavedTensors saved(directory, state);
  for (const bool masters : {false, true}) {
    if (masters) saved.prefer_masters();
    for (const Wanted& each : tensors) {
      const std::vector<SavedTensor> parts =
          saved.tensors_of(each.name, each.first, each.into.elements(), each.slice);
      all.insert(all.end(), parts.begin(), parts.end());
    }
  }
  return all;
}

// Throws Error(kWeights) or Error(kIo) on this rank where it finds the save broken.
SaveState verify_save(Collectives& world, const fs::path& directory, const std::string& id,
                      std::span<const Wanted> tensors, const std::vector<std::string>& hosts,
                      Verify verify) {
  const std::string& host = hosts[at(world.communicator().rank())];
  SaveState state;
  try {
    state = read_save_state(directory);
  } catch (const Error& error) {
    throw_error(error.code(), "{} (on host '{}')", error.what(), host);
  }
  if (state.save != id) {
    throw_error(ErrorCode::kWeights,
                "'{}' on host '{}' holds save {}, on that of rank 0 save {}: the hosts do not see "
                "the same directory",
                directory.string(), host, state.save, id);
  }
  require_complete(directory, state);
  const std::vector<SavedTensor> read = tensors_of(tensors, directory, state);
  if (verify != Verify::kOff) {
    require_hashes(directory, state, my_pieces(world, directory, state, read, hosts, verify));
  }
  std::set<std::string> files;
  for (const SavedTensor& tensor : read) files.insert(tensor.file);
  if (!files.empty()) require_headers(directory, state, files);
  return state;
}

struct Chosen {
  fs::path directory;
  SaveState state;
  std::vector<std::string> notes, passed_over;
};

// The first candidate that verifies on all ranks.
Chosen choose_save(Collectives& world, const Found& found, const fs::path& path,
                   std::span<const Wanted> tensors, const std::vector<std::string>& hosts,
                   Verify verify) {
  std::vector<std::string> notes = found.broken, passed_over;
  for (const auto& [name, id] : found.candidates) {
    SaveState state;
    std::string error;
    try {
      state = verify_save(world, name, id, tensors, hosts, verify);
    } catch (const Error& broken) {
      error = broken.what();
    }
    const std::vector<std::string> errors = world.all_gather_strings(error);
    const auto broken = std::find_if(errors.begin(), errors.end(),
                                     [](const std::string& text) { return !text.empty(); });
    if (broken == errors.end()) {
      return {name, std::move(state), std::move(notes), std::move(passed_over)};
    }
    notes.push_back(*broken);
    passed_over.push_back(save_name(name));
    if (found.one_step) break;
  }
  throw Refused{Error(
      ErrorCode::kWeights,
      fmt::format("{}'{}' holds no save that can be used{}{}", found.one_step ? "" : "directory ",
                  path.string(), notes.empty() ? "" : ": ", joined(notes, "; ")),
      0)};
}

// Collective. Rank 0's path would count on all ranks.
void require_same_path(Pipeline& pipeline, const fs::path& path) {
  require_same_or_refuse(PipelineAccess::world(pipeline), {{"path to load from", path.string()}});
}

// Collective. Finds and checks what is loaded; throws Refused. `saved` gets the files. Not `all`:
// weights alone.
LoadedCheckpoint find_checkpoint(Pipeline& pipeline, const fs::path& path, Verify verify,
                                 OtherPrecision state, bool all, std::span<const Wanted> tensors,
                                 std::optional<SavedTensors>& saved) {
  LoadedCheckpoint loaded;
  Collectives& world = PipelineAccess::world(pipeline);
  const JobLayout& layout = PipelineAccess::layout(pipeline);
  const Found found = find_saves(world, path, /*resumable=*/all);
  Chosen chosen = choose_save(world, found, path, tensors, PipelineAccess::hosts(pipeline), verify);
  on_all_ranks(world, [&] {
    loaded.directory = chosen.directory;
    if (all && chosen.state.weights_only) {
      throw_error(ErrorCode::kWeights, "'{}' holds weights alone: it cannot be resumed",
                  chosen.directory.string());
    }
    if (all && chosen.state.step > Pipeline::kMostSteps) {
      throw_error(ErrorCode::kWeights, "'{}' is of step {}; a run goes on from at most {}",
                  chosen.directory.string(), chosen.state.step, Pipeline::kMostSteps);
    }
    saved.emplace(chosen.directory, chosen.state);
    if (all) saved->prefer_masters();
    require_fitting(*saved, layout, loaded.directory);
    require_tensors(*saved, tensors, state, loaded.directory);
  });
  if (all) loaded.states = read_states(world, chosen.directory, chosen.state);
  loaded.run = chosen.state.run;
  loaded.step = chosen.state.step;
  loaded.options = std::move(chosen.state.options);
  loaded.data = std::move(chosen.state.data);
  loaded.skipped = std::move(chosen.state.skipped);
  loaded.virtual_replicas = chosen.state.virtual_replicas();
  loaded.gradient_order = chosen.state.gradient_order();
  loaded.tensor_shards = chosen.state.tensor_shards();
  loaded.arithmetic = arithmetic_change(chosen.state.arithmetic, layout.arithmetic);
  loaded.notes = std::move(chosen.notes);
  loaded.passed_over = std::move(chosen.passed_over);
  return loaded;
}

LoadedCheckpoint load(Pipeline& pipeline, const fs::path& path, Verify verify, OtherPrecision state,
                      bool all) {
  LoadedCheckpoint loaded;
  const char* const what = all ? "loading the checkpoint" : "loading the weights";
  PipelineAccess::run_call(pipeline, Call::kLoad, what, [&] {
    require_same_path(pipeline, path);
    const std::vector<Wanted> tensors = wanted(pipeline, all);
    std::optional<SavedTensors> saved;
    loaded = find_checkpoint(pipeline, path, verify, state, all, tensors, saved);
    read_values(pipeline, *saved, tensors);
    PipelineAccess::world(pipeline).barrier();
  });
  if (all) pipeline.set_step(loaded.step);
  pipeline.values_changed();
  return loaded;
}

}  // namespace

std::uint64_t require_fitting_save(const JobLayout& layout, const fs::path& path) {
  const SaveSelection selection = select_saves(path);
  if (selection.candidates.empty()) {
    throw_error(ErrorCode::kWeights, "'{}' holds no save{}{}", path.string(),
                selection.broken.empty() ? "" : ": ", joined(selection.broken, "; "));
  }
  const Save& save = newest_resumable(selection);
  require_fitting(SavedTensors(save.directory, save.state), layout, save.directory);
  return save.state.step;
}

LoadedCheckpoint load_checkpoint(Pipeline& pipeline, const fs::path& path, Verify verify,
                                 OtherPrecision state) {
  return load(pipeline, path, verify, state, /*all=*/true);
}

void load_weights(Pipeline& pipeline, const fs::path& path, Verify verify) {
  (void)load(pipeline, path, verify, OtherPrecision::kRefuse, /*all=*/false);
}

void load_weights(Pipeline& pipeline, const fs::path& directory, const FileLayout& layout) {
  PipelineAccess::run_call(pipeline, Call::kLoad, "loading the weights", [&] {
    require_same_path(pipeline, directory);
    const std::vector<Wanted> tensors = wanted(pipeline, /*optimizer=*/false);
    std::optional<SavedTensors> saved;
    on_all_ranks(PipelineAccess::world(pipeline), [&] {
      saved.emplace(directory, layout);
      require_fitting(*saved, PipelineAccess::layout(pipeline), directory);
      require_tensors(*saved, tensors, OtherPrecision::kRefuse, directory);
    });
    read_values(pipeline, *saved, tensors);
    require_same_values(pipeline, tensors, directory);
    PipelineAccess::world(pipeline).barrier();
  });
  pipeline.values_changed();
}

}  // namespace sluice
