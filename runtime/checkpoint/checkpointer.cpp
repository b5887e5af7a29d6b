// Saving while a pipeline trains: copy, write on a thread, publish in a later step.
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include <sluice/checkpoint.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/rethrow_from.hpp"
#include "runtime/checkpoint/background.hpp"
#include "runtime/checkpoint/program_state.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/save_files.hpp"
#include "runtime/checkpoint/save_lock.hpp"
#include "runtime/checkpoint/save_state.hpp"
#include "runtime/checkpoint/saved_tensors.hpp"
#include "runtime/checkpoint/snapshot.hpp"
#include "runtime/checkpoint/state_parts.hpp"
#include "runtime/files/checksum.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/files/utc_text.hpp"
#include "runtime/gradients/offloaded_state.hpp"
#include "runtime/group/configuration.hpp"
#include "runtime/layout/save_shares.hpp"
#include "runtime/pipeline/call.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/weights/file_layout.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Bits of PipelineAccess::step_flags().
enum Flag : std::uint32_t {
  kStop = 1,    // this rank asks to stop
  kBusy = 2,    // its writer works
  kFailed = 4,  // its writer failed
  kDue = 8,     // rank 0: a save by the clock is due
};

// Whole values of a rank's parameters one after the other, where each replica has a part of them.
// All replicas take all of them in one order, whichever saves them.
class WholeValues {
 public:
  explicit WholeValues(Pipeline& pipeline) : pipeline_(pipeline) {
    if (PipelineAccess::layout(pipeline).parameters.gather == Gather::kNever) return;
    for (const Pipeline::Owned& owned : pipeline.parameters()) {
      if (owned.owner) all_.push_back(owned.parameter);
    }
  }
  // Goes on to the parameter of this name; where none of those left has it, past all of them.
  void reach(const std::string& name) {
    while (next_ < all_.size() && (next_ == 0 || all_[next_ - 1]->name != name)) {
      if (next_ > 0) PipelineAccess::give_back(pipeline_, *all_[next_ - 1]);
      PipelineAccess::lend(pipeline_, *all_[next_++]);
    }
  }
  void end() {
    reach("");
    if (next_ > 0) PipelineAccess::give_back(pipeline_, *all_[next_ - 1]);
  }

 private:
  Pipeline& pipeline_;
  std::vector<const Parameter*> all_;
  std::size_t next_ = 0;
};

// Reads so many bytes of offloaded state; once it has, the next update may change them.
class OffloadedBytes {
 public:
  OffloadedBytes(OffloadedState& state, std::size_t bytes)
      : access_(std::in_place, state, OffloadedState::Access::Use::kReads), left_(bytes) {}
  void read(const std::byte* address, std::span<std::byte> into) {
    if (into.empty()) return;
    access_->read(address, into);
    left_ -= into.size();
    if (left_ == 0) access_.reset();
  }

 private:
  std::optional<OffloadedState::Access> access_;
  std::size_t left_;
};

}  // namespace

struct Checkpointer::Impl {
  Impl(Pipeline& pipeline_in, CheckpointOptions options_in,
       std::function<void(const std::string&)> note_in);
  ~Impl();

  [[nodiscard]] Collectives& world() const { return PipelineAccess::world(pipeline); }
  [[nodiscard]] bool first() const { return rank == 0; }
  // For a body that on_all_ranks() runs: what `note` throws is refused on all ranks.
  void say(const std::string& line) const {
    if (!first() || !note) return;
    calling("the note of a Checkpointer", [&] { note(line); });
  }
  // Collective: says rank 0's lines.
  void tell(const std::vector<std::string>& lines);
  void require_sensible() const;
  void require_same_options();
  void find_leaders();
  void require_whole_stages() const;
  void open_directory();
  void share_files();
  void require_visible();
  void require_own_directory(const SaveScan& scan) const;
  void collect_share();
  void count_bytes();
  [[nodiscard]] SaveParts parts_of_ranks(std::size_t tensors) const;
  // Whether the files of the optimizer have the f32 values beside the model's rounded ones.
  [[nodiscard]] bool has_masters() const {
    return options.precision != DType::kF32 && !options.weights_only;
  }
  [[nodiscard]] Retention retention() const;
  void make_room();
  [[nodiscard]] std::uint32_t flags() const;
  // On rank 0: removes the stop file. Lines for people.
  [[nodiscard]] std::vector<std::string> remove_stop_file() const;
  void begin();
  struct ShareTensors {
    std::vector<SaveTensor> model, optimizer;
  };
  // `state` reads what is offloaded; null: nothing is.
  [[nodiscard]] ShareTensors share_tensors(const std::shared_ptr<OffloadedBytes>& state) const;
  void write_share(std::uint64_t step, const std::shared_ptr<OffloadedBytes>& state);
  void gather_facts();
  void publish();
  // Moves on by one phase; requires that the writers of all ranks are done.
  void advance();
  void finish_open_save();
  void on_all_ranks_or_abandon(const std::function<void()>& body);
  void abandon();
  void rethrow_writer_error();

  enum class Phase { kIdle, kWriting, kPublishing };

  Pipeline& pipeline;
  CheckpointOptions options;
  std::function<void(const std::string&)> note;
  const JobLayout& layout;
  int rank;
  const std::vector<std::string>& hosts;  // [rank of the job]
  bool leader = false;                    // manages a directory
  std::unique_ptr<SaveLock> lock;         // the leader's
  std::string run;
  std::uint64_t sequence = 0;  // of the next save
  fs::path newest;             // on the leader

  SaveParts model_parts, optimizer_parts;
  // Parameters, buffers, then optimizer state, that this rank saves or has parts of.
  std::vector<TakenTensor> live;
  std::vector<NamedTensor> offloaded;  // state in place of that in `live`: addresses
  // Of this rank's share, the tensors that it saves; the latter with buffers.
  std::size_t parameters = 0, model_tensors = 0;
  std::vector<std::optional<SavedRange>> ranges;  // [state] of the share
  std::uint64_t share_bytes = 0, job_bytes = 0;
  Snapshot snapshot;
  std::map<std::string, std::function<ProgramState()>> takers;
  SavedStates states;  // on rank 0, of the open save

  Phase phase = Phase::kIdle;
  // Of the newest or open save, and of the newest that is published.
  std::optional<std::uint64_t> saved_step, published_step;
  fs::path partial;
  SaveState state;                    // of the open save; complete on a leader that publishes
  std::vector<std::string> warnings;  // about what was set aside or cannot be removed
  bool waited = false;                // said that a save waits
  std::vector<std::uint64_t> skipped;
  bool stop = false;
  std::atomic<bool> stop_asked = false;
  Clock::time_point last_begin = Clock::now();
  mutable Clock::time_point next_look = Clock::now();  // for the stop file
  mutable bool stop_file = false;
  Background writer;  // last: its job uses what stands above
};

Checkpointer::Impl::Impl(Pipeline& pipeline_in, CheckpointOptions options_in,
                         std::function<void(const std::string&)> note_in)
    : pipeline(pipeline_in),
      options(std::move(options_in)),
      note(std::move(note_in)),
      layout(PipelineAccess::layout(pipeline_in)),
      rank(PipelineAccess::world(pipeline_in).communicator().rank()),
      hosts(PipelineAccess::hosts(pipeline_in)),
      snapshot(pipeline_in.compute(), PipelineAccess::tensor_ranks(pipeline_in)),
      skipped(options.skipped) {
  PipelineAccess::run_call(pipeline, Call::kSave, "the directory of saves", [&] {
    on_all_ranks(world(), [&] { require_sensible(); });
    require_same_options();
    find_leaders();
    open_directory();
    collect_share();
    on_all_ranks(world(), [&] {
      if (leader) make_room();
    });
  });
  PipelineAccess::set_step_flags(pipeline, [this] { return flags(); });
}

Checkpointer::Impl::~Impl() {
  PipelineAccess::set_step_flags(pipeline, {});
  writer.wait();
  abandon();  // other ranks may still write into it; the next start removes what is left then
}

void Checkpointer::Impl::require_sensible() const {
  if (options.directory.empty()) throw_usage("a Checkpointer needs a directory");
  if (options.keep < 1) {
    throw_usage("keeping {} saves keeps none; the nearest legal value is 1", options.keep);
  }
  if (!options.model.empty() && !is_state_json(options.model)) {
    throw_usage("the model's text of a Checkpointer is no JSON that a save can hold");
  }
  if (options.precision != DType::kF32 && options.precision != DType::kBf16) {
    throw_usage("a Checkpointer's precision of {}; legal are f32 and bf16",
                name_of(options.precision));
  }
  const std::span<const std::string_view> legal = model_file_names();
  for (const auto& [name, text] : options.files) {
    if (std::find(legal.begin(), legal.end(), name) != legal.end()) continue;
    throw_usage("a Checkpointer's file '{}'; legal are {}", name, joined(legal, ", "));
  }
  if (!options.run.empty() && !is_id(options.run)) {
    throw_usage(
        "a Checkpointer's run of {} characters; legal are the 32 hexadecimal digits of "
        "LoadedCheckpoint::run, and none for a new run",
        options.run.size());
  }
  if (!(options.every_minutes >= 0)) {
    throw_usage("saving every {} minutes is not possible; 0 means never", options.every_minutes);
  }
}

void Checkpointer::Impl::require_same_options() {
  require_same_or_refuse(
      world(), {{"directory of saves", options.directory.string()},
                {"every_steps", fmt::format("{}", options.every_steps)},
                {"every_minutes", fmt::format("{}", options.every_minutes)},
                {"keep", fmt::format("{} {}", options.keep, options.keep_every)},
                {"weights_only", fmt::format("{} {}", options.weights_only, options.local)},
                {"precision", name_of(options.precision)}});
}

void Checkpointer::Impl::find_leaders() {
  const auto first_of_host = std::find(hosts.begin(), hosts.end(), hosts[at(rank)]);
  leader = options.local ? first_of_host - hosts.begin() == rank : rank == 0;
  if (options.local) on_all_ranks(world(), [&] { require_whole_stages(); });
}

// The ranks that hold a stage share its writing, and a rank reads it from its own host's directory.
void Checkpointer::Impl::require_whole_stages() const {
  const auto require = [&](Axis axis, const char* each, const char* order) {
    for (const std::vector<int>& holders : layout.place.topology.groups(axis)) {
      const int first = holders.front();
      for (const int other : holders) {
        if (hosts[at(first)] == hosts[at(other)]) continue;
        throw_usage(
            "a directory of its own for each host: ranks {} and {} hold the same stages on hosts "
            "'{}' and '{}', and {}; use a directory that all hosts see, or {}",
            first, other, hosts[at(first)], hosts[at(other)], each, order);
      }
    }
  };
  require(Axis::kTensor, "the values of both are gathered on one of them",
          "hosts that hold all tensor ranks of a stage");
  require(Axis::kReplica, "each would save a part",
          "an order in which the replicas of a stage share a host (RankOrder::kReplicaFirst)");
}

void Checkpointer::Impl::open_directory() {
  on_all_ranks(world(), [&] {
    if (!leader) return;
    std::error_code error;
    options.directory = fs::absolute(options.directory, error).lexically_normal();
    fs::create_directories(options.directory, error);
    if (error || !fs::is_directory(options.directory)) {
      throw_error(ErrorCode::kIo, "cannot create directory '{}': {}", options.directory.string(),
                  error ? error.message() : "it is no directory");
    }
    if (select_saves(options.directory).one_step) {
      throw_usage("'{}' is one save of a directory of saves; give that directory",
                  options.directory.string());
    }
    lock = std::make_unique<SaveLock>(options.directory, SaveLock::kWatch,
                                      [this](const std::string& line) { say(line); });
    for (const std::string& line : open_save_directory(options.directory)) say(line);
    const SaveScan scan = scan_saves(options.directory);
    require_own_directory(scan);
    if (!scan.saves.empty()) {
      newest = scan.saves.front().directory;
      PipelineAccess::saved(pipeline, scan.saves.front().state.step);
      sequence = scan.saves.front().state.sequence;
    }
  });
  options.directory = world().broadcast_string(options.directory.string(), 0);
  share_files();
  require_visible();
  run = world().broadcast_string(options.run.empty() ? random_id() : options.run, 0);
  for (const std::string& theirs : world().all_gather_strings(std::to_string(sequence))) {
    sequence = std::max<std::uint64_t>(sequence, std::stoull(theirs));
  }
  ++sequence;
}

// Leaders of other hosts get rank 0's files.
void Checkpointer::Impl::share_files() {
  const std::string all = world().broadcast_string(to_cbor(options.files), 0);  // not all UTF-8
  if (!leader) options.files.clear();
  if (leader) from_cbor(all).get_to(options.files);
}

// The newest save has to be of this run. Older ones of another run are what an --overwrite that
// was killed left.
void Checkpointer::Impl::require_own_directory(const SaveScan& scan) const {
  if (options.overwrite) return;
  std::string what;
  for (const Save& save : scan.saves) {
    const std::string name = save.directory.filename().string();
    if (&save == &scan.saves.front() && save.state.run != options.run) {
      what = fmt::format("'{}' of another run", name);
    }
    const bool damaged =
        std::find(options.damaged.begin(), options.damaged.end(), name) != options.damaged.end();
    const bool progress = save.state.run == options.run && save.state.step > pipeline.step() &&
                          !save.state.weights_only && !damaged;
    if (what.empty() && progress) {
      what = fmt::format("'{}', which is newer than step {} that this run goes on from", name,
                         pipeline.step());
    }
  }
  if (what.empty() && options.run.empty() && !scan.broken.empty()) {
    what = "a damaged save: " + scan.broken.front();
  }
  if (what.empty()) return;
  throw_error(ErrorCode::kIo,
              "directory '{}' holds {}; --resume auto goes on with what is there, --overwrite "
              "replaces it, or give another --save (in a program: CheckpointOptions::run, "
              "overwrite, directory)",
              options.directory.string(), what);
}

void Checkpointer::Impl::require_visible() {
  if (options.local) return;
  const Visibility seen = find_visibility(world(), hosts, options.directory);
  if (!seen.problem.empty()) throw Refused{Error(ErrorCode::kIo, seen.problem, 0)};
  std::vector<std::string> blind;
  for (std::size_t each = 0; each < hosts.size(); ++each) {
    if (seen.after[each] < 0) blind.push_back(hosts[each]);
  }
  if (blind.empty()) return;
  throw Refused{Error(
      ErrorCode::kIo,
      fmt::format(
          "directory '{}' of host '{}' is not seen on host{} '{}'; all hosts need "
          "it (a shared file system), or --save-local (CheckpointOptions::local) for one on each",
          options.directory.string(), hosts.front(), blind.size() == 1 ? "" : "s",
          joined(blind, "', '")),
      0)};
}

void Checkpointer::Impl::collect_share() {
  const Place& here = layout.place.here;
  const std::vector<SavedParameter> shares = share_saves(layout);
  std::map<std::string, const SavedParameter*> held;  // by this rank of the pipeline
  std::vector<std::string> all;
  for (const SavedParameter& share : shares) {
    all.push_back(share.name);
    if (share.rank == here.pipeline) held.emplace(share.name, &share);
  }
  const auto add = [&](const Pipeline::Owned& owned) {
    const Parameter& parameter = *owned.parameter;
    const SavedParameter& share = *held.at(parameter.name);
    if (share.replica != here.replica || (!share.sliced() && share.tensor != here.tensor)) return;
    live.push_back({parameter.name,
                    parameter.value,
                    {parameter.value.spec.dtype, parameter.whole_shape()},
                    share.tensor});
    if (!share.sliced()) return;
    for (const ParameterEntry* entry : share.entries) live.back().parts.push_back(entry->placed());
  };
  const auto held_here = [&] {
    return static_cast<std::size_t>(
        std::count_if(live.begin(), live.end(),
                      [&](const TakenTensor& taken) { return taken.holder == here.tensor; }));
  };
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    if (owned.owner) add(owned);
  }
  parameters = held_here();
  for (const Pipeline::Owned& owned : pipeline.buffers()) add(owned);
  model_tensors = held_here();
  on_all_ranks(world(), [&] {
    require_own_names(options.layout, all);
    for (const TakenTensor& taken : live) {
      (void)parts_of(options.layout, taken.name, taken.whole.shape);
    }
    if (options.weights_only) return;
    const RangeNames names(all, options.layout);
    for (const StatePart& part : state_parts(pipeline)) {
      const SavedParameter& share = *held.at(part.parameter);
      if (!part.divided && share.replica != here.replica) continue;
      if (part.slice.all() && share.tensor != here.tensor) continue;
      std::optional<SavedRange> range;
      if (!part.is_whole()) range = {part.name, part.shape, part.first, part.slice};
      std::string name = range ? names.of(*range, part.tensor.elements()) : part.name;
      if (PipelineAccess::offloaded_state(pipeline) != nullptr) {
        offloaded.push_back({std::move(name), part.tensor});
      } else {
        live.push_back({std::move(name), part.tensor, part.tensor.spec, here.tensor});
      }
      ranges.push_back(std::move(range));
    }
  });
  count_bytes();
  model_parts = parts_of_ranks(model_tensors);
  optimizer_parts = parts_of_ranks(ranges.size() + (has_masters() ? parameters : 0));
}

// Collective.
void Checkpointer::Impl::count_bytes() {
  std::size_t place = 0;
  for (const TakenTensor& taken : live) {
    if (taken.holder != layout.place.here.tensor) continue;
    share_bytes += taken.whole.bytes();
    const bool rounded = place++ < parameters && options.precision != DType::kF32;
    if (rounded) share_bytes += taken.whole.bytes() / 2;  // the rounded values come on top
  }
  for (const NamedTensor& each : offloaded) share_bytes += each.tensor.spec.bytes();
  for (const std::string& theirs : world().all_gather_strings(std::to_string(share_bytes))) {
    job_bytes += std::stoull(theirs);
  }
}

// Collective. The files of one kind, of which this rank saves so many tensors.
SaveParts Checkpointer::Impl::parts_of_ranks(std::size_t tensors) const {
  std::vector<int> all(at(layout.place.topology.ranks()));
  world().all_gather(static_cast<int>(tensors), all);
  return save_parts(all, layout.place.topology);
}

Retention Checkpointer::Impl::retention() const {
  Retention retention = {.run = run,
                         .keep = options.keep,
                         .keep_every = options.keep_every,
                         .remove_other_runs = options.overwrite};
  for (const std::string& name : options.damaged) {
    retention.damaged.push_back(options.directory / name);
  }
  return retention;
}

// On a leader. Saves beyond `keep` go before the next one only where it has no room beside them.
void Checkpointer::Impl::make_room() {
  try {
    return require_space(options.directory, job_bytes);
  } catch (const Error&) {
    Retention own = retention();
    own.remove_other_runs = false;
    prune_saves(options.directory, own, warnings);
  }
  require_space(options.directory, job_bytes);
}

// When a step's record is packed. The stop file is looked for at most ten times a second.
std::uint32_t Checkpointer::Impl::flags() const {
  std::uint32_t mine = 0;
  if (writer.busy()) {
    mine |= kBusy;
  } else if (writer.failed()) {
    mine |= kFailed;
  }
  const auto now = Clock::now();
  if (first() && now >= next_look) {
    std::error_code error;
    stop_file = fs::is_regular_file(options.directory / "stop", error);
    next_look = now + std::chrono::milliseconds(100);
  }
  if (stop_asked || stop_file) mine |= kStop;
  if (first() && options.every_minutes > 0 &&
      now - last_begin >= std::chrono::duration<double>(60 * options.every_minutes)) {
    mine |= kDue;
  }
  return mine;
}

std::vector<std::string> Checkpointer::Impl::remove_stop_file() const {
  const fs::path path = options.directory / "stop";
  std::error_code error;
  if (!first() || !fs::is_regular_file(path, error)) return {};
  fs::remove(path, error);
  if (!error) return {};
  return {fmt::format("cannot remove '{}' ({}): it stops every later start as well", path.string(),
                      error.message())};
}

void Checkpointer::Impl::tell(const std::vector<std::string>& lines) {
  PipelineAccess::run_call(pipeline, Call::kSave, "saving", [&] {
    on_all_ranks(world(), [&] {
      for (const std::string& line : lines) say(line);
    });
  });
}

void Checkpointer::Impl::begin() {
  const std::uint64_t step = pipeline.step();
  PipelineAccess::run_call(pipeline, Call::kSave, "saving", [&] {
    partial.clear();
    states = {};
    phase = Phase::kWriting;
    on_all_ranks_or_abandon([&] {
      if (options.before_save) options.before_save();
      if (first()) {
        for (const auto& [each, take] : takers) {
          states.add(each, calling("state '" + each + "'", take));
        }
      }
      if (!leader) return;
      lock->require_held();
      make_room();
      partial = begin_save(options.directory, step, warnings);
    });
    partial = options.directory / world().broadcast_string(partial.filename().string(), 0);
    std::vector<TakenTensor> taken = live;
    for (TakenTensor& each : taken) {
      each.tensor = PipelineAccess::before_open_step(pipeline, each.tensor);
    }
    WholeValues values(pipeline);
    snapshot.take(taken, [&](const TakenTensor& next) { values.reach(next.name); });
    values.end();
    std::shared_ptr<OffloadedBytes> offloaded_state;
    if (!offloaded.empty()) {
      std::size_t bytes = 0;
      for (const NamedTensor& each : offloaded) bytes += each.tensor.spec.bytes();
      offloaded_state =
          std::make_shared<OffloadedBytes>(*PipelineAccess::offloaded_state(pipeline), bytes);
    }
    state = {};
    const std::string name = fmt::format("{} {}", run, sequence);
    state.save = checksum_hex(std::as_bytes(std::span(name)));
    state.run = run;
    state.sequence = sequence;
    state.step = step;
    state.weights_only = options.weights_only;
    state.time = utc_text(std::time(nullptr), "%Y-%m-%dT%H:%M:%SZ");
    writer.start([this, step, offloaded_state] { write_share(step, offloaded_state); });
  });
  saved_step = step;
  last_begin = Clock::now();
}

// On the writer's thread.
void Checkpointer::Impl::write_share(std::uint64_t step,
                                     const std::shared_ptr<OffloadedBytes>& offloaded_state) {
  const std::map<std::string, std::string> metadata = {
      {"format", "pt"}, {"step", std::to_string(step)}, {"save", state.save}};
  const ShareTensors share = share_tensors(offloaded_state);
  // The next update waits until state that is offloaded has been read.
  if (!share.optimizer.empty()) {
    write_save_file(partial, optimizer_parts.file_name("optimizer", rank), share.optimizer,
                    metadata, state);
  }
  if (!share.model.empty()) {
    write_save_file(partial, model_parts.file_name("model", rank), share.model, metadata, state);
  }
  if (!states.tensors().empty()) {
    std::vector<SaveTensor> user;
    for (const NamedTensor& named : states.tensors()) user.push_back(save_tensor(named));
    write_save_file(partial, "user.safetensors", user, metadata, state);
  }
}

// The copies as they go into files.
Checkpointer::Impl::ShareTensors Checkpointer::Impl::share_tensors(
    const std::shared_ptr<OffloadedBytes>& offloaded_state) const {
  ShareTensors share;
  std::size_t index = 0;
  for (const NamedTensor& copy : snapshot.tensors()) {
    const std::size_t place = index++;
    if (place >= model_tensors) {
      share.optimizer.push_back(save_tensor(copy));
      share.optimizer.back().listed.range = ranges[place - model_tensors];
      continue;
    }
    const bool rounded = place < parameters && options.precision != DType::kF32;
    add_parts(copy, options.layout, rounded ? options.precision : DType::kF32, share.model);
    if (rounded && has_masters()) {
      share.optimizer.push_back(
          save_tensor({fmt::format("{}.{}", kMasterKind, copy.name), copy.tensor}));
    }
  }
  for (std::size_t i = 0; i < offloaded.size(); ++i) {
    const auto& [name, tensor] = offloaded[i];
    const auto next = [offloaded_state, address = tensor.as<const std::byte>(),
                       left = tensor.spec.bytes()](std::vector<std::byte>& scratch) mutable {
      scratch.resize(std::min(left, std::size_t{1} << 20));
      offloaded_state->read(std::exchange(address, address + scratch.size()), scratch);
      left -= scratch.size();
      return std::span<const std::byte>(scratch);
    };
    share.optimizer.push_back({{.name = name, .spec = tensor.spec, .range = ranges[i]}, next});
  }
  return share;
}

// Every leader gets what the ranks of its directory have written.
void Checkpointer::Impl::gather_facts() {
  const std::vector<std::string> facts = world().all_gather_strings(to_json_text(state));
  if (!leader) return;
  for (std::size_t other = 0; other < facts.size(); ++other) {
    if (static_cast<int>(other) == rank) continue;
    if (options.local && hosts[other] != hosts[at(rank)]) continue;
    SaveState theirs = parse_save_state(facts[other], partial / "state.json");
    std::move(theirs.files.begin(), theirs.files.end(), std::back_inserter(state.files));
    std::move(theirs.tensors.begin(), theirs.tensors.end(), std::back_inserter(state.tensors));
  }
  const Topology& topology = layout.place.topology;
  state.layout = {{"ranks", topology.ranks()},
                  {"pipeline", topology.size.pipeline},
                  {"replicas", topology.size.replica},
                  {"stages", layout.plans.num_stages()}};
  if (topology.size.tensor > 1) state.layout["tensor"] = topology.size.tensor;
  if (layout.place.shards > 1) state.layout["tensor_shards"] = layout.place.shards;
  if (layout.place.shares > 1) state.layout["virtual_replicas"] = layout.place.virtual_replicas();
  if (layout.parameters.sums_each_micro_batch) state.layout[kMicroBatchOrder] = 1;
  if (options.local) state.layout["local"] = 1;
  for (const auto& [text, ranks] : layout.arithmetic) state.arithmetic.push_back(text);
  state.options = options.options;
  state.data = options.data;
  state.model = options.model;
  state.skipped = skipped;
  state.user = states.json();
}

// On the writer's thread of a leader.
void Checkpointer::Impl::publish() {
  write_save_index(partial, "model", state);
  write_save_index(partial, "optimizer", state);
  for (const auto& [name, text] : options.files) write_save_text(partial, name, text, state);
  lock->require_held();
  publish_save(options.directory, partial, state, warnings);
  PipelineAccess::saved(pipeline, state.step);
  prune_saves(options.directory, retention(), warnings);
}

// Throws Refused on all ranks where `body` throws on any, after which no save is open.
void Checkpointer::Impl::on_all_ranks_or_abandon(const std::function<void()>& body) {
  try {
    on_all_ranks(world(), body);
  } catch (const Refused&) {
    abandon();
    saved_step = published_step;
    throw;
  }
}

// Removes the files of an open save.
void Checkpointer::Impl::abandon() {
  if (phase == Phase::kIdle) return;
  phase = Phase::kIdle;
  if (!leader || partial.empty()) return;
  try {
    abandon_save(partial);
  } catch (const Error&) {  // the next start removes what is left
  }
}

void Checkpointer::Impl::rethrow_writer_error() {
  writer.wait();
  PipelineAccess::run_call(pipeline, Call::kSave, "saving",
                           [&] { on_all_ranks_or_abandon([&] { writer.rethrow(); }); });
}

void Checkpointer::Impl::advance() {
  rethrow_writer_error();
  if (phase == Phase::kWriting) {
    PipelineAccess::guarded(pipeline, "saving", [&] { gather_facts(); });
    if (leader) writer.start([this] { publish(); });
    phase = Phase::kPublishing;
  } else if (phase == Phase::kPublishing) {
    if (leader) newest = options.directory / step_directory_name(state.step);
    PipelineAccess::saved(pipeline, state.step);
    ++sequence;
    published_step = saved_step;
    phase = Phase::kIdle;
    tell(std::exchange(warnings, {}));
  }
}

void Checkpointer::Impl::finish_open_save() {
  while (phase != Phase::kIdle) {
    writer.wait();
    advance();
  }
}

Checkpointer::Checkpointer(Pipeline& pipeline, CheckpointOptions options,
                           std::function<void(const std::string&)> note)
    : impl_(std::make_unique<Impl>(pipeline, std::move(options), std::move(note))) {}
Checkpointer::~Checkpointer() = default;

void Checkpointer::add_state(std::string name, std::function<ProgramState()> take) {
  if (!take) throw_usage("state '{}': no function that takes it", name);
  if (name.empty() || name.find('/') != std::string::npos || impl_->takers.contains(name)) {
    throw_usage("state '{}': a name is not empty, has no '/' and is given once", name);
  }
  constexpr std::size_t kMostStates = 4000;
  if (impl_->takers.size() == kMostStates) {
    throw_usage("state '{}': a save holds at most {} states", name, kMostStates);
  }
  impl_->takers.emplace(std::move(name), std::move(take));
}

void Checkpointer::after_step(const StepReport& report) {
  Impl& me = *impl_;
  PipelineAccess::require_idle(me.pipeline);
  if (report.skipped) me.skipped.push_back(report.step);
  const std::uint32_t flags = PipelineAccess::step_flags(me.pipeline);
  if ((flags & kStop) != 0 && !me.stop) {
    me.stop = true;
    me.tell(me.remove_stop_file());
  }
  if ((flags & kFailed) != 0) me.rethrow_writer_error();
  if (me.phase != Impl::Phase::kIdle && (flags & kBusy) == 0) me.advance();
  const std::uint64_t every = me.options.every_steps;
  const std::uint64_t step = me.pipeline.step();
  if ((every == 0 || step % every != 0) && (flags & kDue) == 0) return;
  if (me.saved_step == step) return;
  if (me.phase != Impl::Phase::kIdle) {
    if (!std::exchange(me.waited, true)) {
      me.tell(
          {fmt::format("the save of step {} waits for that of step {}: the disk is slower than "
                       "saves are due",
                       step, *me.saved_step)});
    }
    me.finish_open_save();
  }
  me.begin();
}

void Checkpointer::save_now() {
  Impl& me = *impl_;
  // Ranks of different steps would part below.
  PipelineAccess::run_call(me.pipeline, Call::kSave, "saving", [] {});
  me.finish_open_save();
  if (me.saved_step == me.pipeline.step()) return;
  me.begin();
  me.finish_open_save();
}

void Checkpointer::request_stop() noexcept { impl_->stop_asked = true; }
bool Checkpointer::stop_requested() const { return impl_->stop; }
fs::path Checkpointer::last_save() const { return impl_->newest; }

void save_checkpoint(Pipeline& pipeline, const CheckpointOptions& options) {
  Checkpointer(pipeline, options).save_now();
}

}  // namespace sluice
