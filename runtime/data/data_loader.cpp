// Batches in a ring of slots. Whoever works takes one item after the other, in the order of the
// batches: the workers, or without workers the caller.
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include <sluice/data.hpp>
#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/index.hpp"
#include "comm/base/threads.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/data/draw_below.hpp"
#include "runtime/data/named_calls.hpp"
#include "runtime/data/sample_specs.hpp"
#include "runtime/files/json_text.hpp"

namespace sluice {
namespace {

// The loader for which this thread reads an item.
thread_local const void* reading_for = nullptr;

// Numbers that differ from every layer's random_site() and from the token source's.
constexpr std::uint64_t kOrderSite = 0xDA7A04DE, kItemSite = 0xDA7A17E3;
constexpr int kMostWorkers = 1024, kMostAhead = 4096;

// Of the next batch: its epoch and its first sample there.
struct Place {
  std::uint64_t epoch = 0;
  std::int64_t first = 0;
};

struct Slot {
  LoadedBatch batch;
  HostBuffer memory;
  std::int64_t handed_out = 0, unread = 0;  // items
  std::int64_t failed = -1;                 // the first item with an error, of the batch
  std::exception_ptr error = nullptr;
};

struct Task {
  Slot* slot = nullptr;
  std::int64_t item = 0;  // of the batch
};

// Tensors of one item.
struct ItemViews {
  std::vector<Tensor> inputs, targets;
};

void require_sensible(const LoaderOptions& options) {
  const auto require = [](std::int64_t value, std::int64_t low, std::int64_t high,
                          const char* name) {
    if (value >= low && value <= high) return;
    throw_usage("LoaderOptions::{} is {}; legal: {} to {}", name, value, low, high);
  };
  require(options.batch_size, 1, INT64_MAX, "batch_size");
  require(options.workers, 0, kMostWorkers, "workers");
  require(options.ahead, 0, kMostAhead, "ahead");
  require(options.share.replicas, 1, INT32_MAX, "share.replicas");
  require(options.share.count, 1, options.share.replicas, "share.count");
  require(options.share.replica, 0, options.share.replicas - options.share.count, "share.replica");
}

std::shared_ptr<const Dataset> require_items(std::shared_ptr<const Dataset> data) {
  if (data == nullptr) throw_usage("a loader needs a data set, got none");
  const std::int64_t size = size_of(*data);
  if (size < 1) throw_usage("the data set has {} items; legal: at least 1", size);
  return data;
}

[[noreturn]] void throw_for_item(const Slot& slot) {
  const LoadedBatch& batch = slot.batch;
  const auto item = static_cast<std::size_t>(slot.failed);
  try {
    std::rethrow_exception(slot.error);
  } catch (...) {
    rethrow_from(
        fmt::format("item {} of the data set (batch from sample {} of epoch {}, worker {})",
                    batch.indices[item], batch.first, batch.epoch, batch.workers[item]));
  }
}

}  // namespace

struct DataLoader::Impl {
  Impl(std::shared_ptr<const Dataset> data_in, const LoaderOptions& options_in)
      : data(require_items(std::move(data_in))), options(options_in), size(size_of(*data)) {
    require_sensible(options);
    require_shares(0);
    if (options.drop_last && size < options.batch_size) {
      throw_usage("drop_last leaves no batch: the data set has {} items, a batch {}", size,
                  options.batch_size);
    }
    allocate();
    const int readers = workers_wanted();
    for (int worker = 0; worker < readers; ++worker) {
      threads.push_back(start_thread<std::jthread>(
          fmt::format("worker {} of {}", worker, readers),
          [this, worker](const std::stop_token& stop) { work(stop, worker); }));
    }
  }

  [[nodiscard]] bool passes_something() const {
    return options.share.inputs || options.share.targets;
  }
  [[nodiscard]] bool ends(const Place& at) const {
    return size - at.first < (options.drop_last ? options.batch_size : 1);
  }
  [[nodiscard]] std::int64_t samples_at(const Place& at) const {
    return std::min(options.batch_size, size - at.first);
  }

  // Every virtual replica needs a sample of every batch from sample `first` of an epoch on.
  void require_shares(std::int64_t first) const {
    const std::int64_t replicas = options.share.replicas;
    const char* const name = options.share.count > 1 ? "virtual replicas" : "replicas";
    if (options.batch_size < replicas) {
      throw_usage("batches of {} samples for {} {}; legal: at least one sample for each",
                  options.batch_size, replicas, name);
    }
    const std::int64_t rest = (size - first) % options.batch_size;
    if (options.drop_last || rest == 0 || rest >= replicas) return;
    throw_usage(
        "the last batch of an epoch has {} of {} items for {} {}; drop_last leaves it out, "
        "or take another batch size than {}",
        rest, size, replicas, name, options.batch_size);
  }

  void allocate() {
    const BatchSpec spec = spec_of(*data);
    const std::int64_t most =
        share_of(std::min(options.batch_size, size), options.share.replicas, 0, options.share.count)
            .count;
    const auto add = [](const std::vector<TensorSpec>& ones, std::vector<TensorSpec>& batches,
                        std::vector<Tensor>& items) {
      for (const TensorSpec& one : ones) {
        batches.push_back(batch_of(one, 1));
        items.push_back({nullptr, one});
      }
    };
    if (options.share.inputs) add(spec.inputs, inputs, views.inputs);
    if (options.share.targets) add(spec.targets, targets, views.targets);
    try {
      if (options.shuffle) order.resize(static_cast<std::size_t>(size));
      ring.resize(workers_wanted() > 0 ? at(options.ahead) + 1 : 1);
      for (Slot& slot : ring) allocate(slot, most);
    } catch (const std::exception&) {  // bad_alloc or length_error
      throw_usage("no memory for {} batches of {} samples{}", ring.size(), most,
                  options.shuffle ? fmt::format(" and the order of {} items", size) : "");
    }
  }
  [[nodiscard]] int workers_wanted() const { return passes_something() ? options.workers : 0; }

  void allocate(Slot& slot, std::int64_t most) const {
    std::size_t bytes = 0;
    const auto place = [&](const std::vector<TensorSpec>& specs, std::vector<Tensor>* tensors) {
      for (const TensorSpec& spec : specs) {
        if (tensors != nullptr) tensors->push_back({slot.memory.data() + bytes, spec});
        const auto count = static_cast<std::size_t>(most);
        add_bytes(bytes, round_up(multiply_bytes(spec.bytes(), count), kBufferAlignment));
      }
    };
    place(inputs, nullptr);
    place(targets, nullptr);
    slot.memory = HostBuffer({}, std::exchange(bytes, 0));
    place(inputs, &slot.batch.inputs);
    place(targets, &slot.batch.targets);
    if (!passes_something()) return;
    slot.batch.indices.reserve(static_cast<std::size_t>(most));
    slot.batch.workers.reserve(static_cast<std::size_t>(most));
  }

  // --- with the mutex: which items come next ---
  // Fisher and Yates' shuffle.
  void shuffle(std::uint64_t epoch) {
    const RandomKey key{.seed = options.seed, .site = kOrderSite, .step = epoch};
    std::iota(order.begin(), order.end(), 0);
    for (std::int64_t i = size - 1; i > 0; --i) {
      std::swap(order[static_cast<std::size_t>(i)],
                order[static_cast<std::size_t>(draw_below(i + 1, key, i))]);
    }
    ordered_epoch = epoch;
  }

  void open_slot() {
    if (ends(reading)) reading = {reading.epoch + 1, 0};
    if (options.shuffle && ordered_epoch != reading.epoch) shuffle(reading.epoch);
    Slot& slot = ring[opened % ring.size()];
    ++opened;
    LoadedBatch& batch = slot.batch;
    batch.epoch = reading.epoch;
    batch.first = reading.first;
    batch.samples = samples_at(reading);
    const BatchShare& share = options.share;
    const SampleRange mine = share_of(batch.samples, share.replicas, share.replica, share.count);
    for (Tensor& tensor : batch.inputs) tensor.spec = with_samples(tensor.spec, mine.count);
    for (Tensor& tensor : batch.targets) tensor.spec = with_samples(tensor.spec, mine.count);
    const std::int64_t items = passes_something() ? mine.count : 0;
    batch.indices.resize(static_cast<std::size_t>(items));
    batch.workers.resize(static_cast<std::size_t>(items));
    std::iota(batch.indices.begin(), batch.indices.end(), reading.first + mine.first);
    if (options.shuffle) {
      for (std::int64_t& index : batch.indices) index = order[static_cast<std::size_t>(index)];
    }
    slot.handed_out = 0;
    slot.unread = items;
    slot.failed = -1;
    slot.error = nullptr;
    reading.first += batch.samples;
  }

  // The next item to read, or none where the ring is full.
  std::optional<Task> take() {
    if (paused) return std::nullopt;
    while (true) {
      if (opened > released) {
        Slot& newest = ring[(opened - 1) % ring.size()];
        if (newest.handed_out < static_cast<std::int64_t>(newest.batch.indices.size())) {
          return Task{&newest, newest.handed_out++};
        }
      }
      if (opened - released == ring.size()) return std::nullopt;
      open_slot();
    }
  }

  // --- reading ---
  // Numbers that the first item leaves unwritten are Error(kUsage).
  void get(const ItemRequest& request, const ItemViews& item) const {
    const bool first = !watched;
    watch_reading(item.inputs, first, "input", [&] {
      watch_reading(item.targets, first, "target",
                    [&] { data->get(request, item.inputs, item.targets); });
    });
    watched = true;
  }

  std::exception_ptr read(const Task& task, int worker, ItemViews& of_worker) const {
    const LoadedBatch& batch = task.slot->batch;
    const ItemRequest request{
        .index = batch.indices[static_cast<std::size_t>(task.item)],
        .epoch = batch.epoch,
        .worker = worker,
        .random = {.seed = options.seed, .site = kItemSite, .step = batch.epoch}};
    const auto place = [&](const std::vector<Tensor>& whole, std::vector<Tensor>& one) {
      for (std::size_t i = 0; i < whole.size(); ++i) {
        one[i].data =
            whole[i].as<std::byte>() + static_cast<std::size_t>(task.item) * one[i].spec.bytes();
      }
    };
    place(batch.inputs, of_worker.inputs);
    place(batch.targets, of_worker.targets);
    try {
      get(request, of_worker);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void perform(std::unique_lock<std::mutex>& lock, const Task& task, int worker,
               ItemViews& of_worker) {
    Slot& slot = *task.slot;
    slot.batch.workers[static_cast<std::size_t>(task.item)] = worker;
    ++active;
    lock.unlock();
    const void* const before = std::exchange(reading_for, this);
    std::exception_ptr error = read(task, worker, of_worker);
    reading_for = before;
    lock.lock();
    --active;
    if (error != nullptr && (slot.failed < 0 || task.item < slot.failed)) {
      slot.failed = task.item;
      slot.error = std::move(error);
    }
    if (--slot.unread == 0 || active == 0) progress.notify_all();
  }

  void work(const std::stop_token& stop, int worker) {
    ItemViews of_worker = views;
    std::unique_lock lock(mutex);
    while (true) {
      std::optional<Task> task;
      space.wait(lock, stop, [&] { return (task = take()).has_value(); });
      if (!task || stop.stop_requested()) return;
      perform(lock, *task, worker, of_worker);
    }
  }

  // --- the caller's side ---
  std::unique_lock<std::mutex> begin_call() {
    if (reading_for == this) throw_usage("a loader is called by the item that it reads");
    return std::unique_lock(mutex);
  }

  void give_back() {
    if (!held) return;
    held = false;
    ++released;
    space.notify_all();
  }

  // Forgets what was read ahead; the next batch is at `place`, and next() begins to read it.
  void go_to(std::unique_lock<std::mutex>& lock, const Place& place) {
    paused = true;
    progress.wait(lock, [this] { return active == 0; });
    opened = released = 0;
    held = false;
    coming = reading = place;
  }

  const LoadedBatch* next() {
    std::unique_lock lock = begin_call();
    give_back();
    if (std::exchange(paused, false)) space.notify_all();
    if (ends(coming)) {
      coming = {coming.epoch + 1, 0};
      return nullptr;
    }
    Slot& slot = ring[released % ring.size()];
    if (threads.empty()) {
      while (const std::optional<Task> task = take()) perform(lock, *task, 0, views);
    }
    progress.wait(lock, [&] { return opened > released && slot.unread == 0; });
    if (slot.error != nullptr) {
      go_to(lock, coming);
      throw_for_item(slot);
    }
    coming.first += slot.batch.samples;
    held = true;
    return &slot.batch;
  }

  std::shared_ptr<const Dataset> data;
  LoaderOptions options;
  std::int64_t size;
  std::vector<TensorSpec> inputs, targets;    // of a batch of one sample, of what this rank passes
  mutable std::atomic<bool> watched = false;  // an item was
  ItemViews views;                            // without memory; the caller's own where it reads

  std::mutex mutex;
  std::condition_variable_any space, progress;  // for workers; for the caller
  std::vector<Slot> ring;
  std::size_t opened = 0, released = 0;  // slots, since go_to()
  Place reading, coming;                 // the next batch to open; the next that next() returns
  bool held = false;                     // the caller has the slot `released`
  bool paused = false;                   // from go_to() to next(): no item is handed out
  int active = 0;                        // items that are being read
  std::vector<std::int64_t> order;       // of ordered_epoch; empty without shuffling
  std::optional<std::uint64_t> ordered_epoch;
  std::vector<std::jthread> threads;  // last: they stop before what they use goes
};

DataLoader::DataLoader(std::shared_ptr<const Dataset> data, const LoaderOptions& options)
    : impl_(std::make_unique<Impl>(std::move(data), options)) {}
DataLoader::~DataLoader() = default;
DataLoader::DataLoader(DataLoader&&) noexcept = default;
DataLoader& DataLoader::operator=(DataLoader&&) noexcept = default;

DataLoader::Impl& DataLoader::impl() const {
  if (impl_ == nullptr) throw_usage("a DataLoader that was moved from has no batches");
  return *impl_;
}

const LoadedBatch* DataLoader::next() { return impl().next(); }

void DataLoader::skip() {
  Impl& me = impl();
  std::unique_lock lock = me.begin_call();
  me.give_back();
  Place after = me.coming;
  if (me.ends(after)) return;
  after.first += me.samples_at(after);
  me.go_to(lock, after);
}

std::uint64_t DataLoader::epoch() const { return impl().coming.epoch; }
const LoaderOptions& DataLoader::options() const { return impl().options; }

std::int64_t DataLoader::batches() const {
  const std::int64_t whole = impl().size / impl().options.batch_size;
  const bool rest = impl().size % impl().options.batch_size != 0 && !impl().options.drop_last;
  return whole + (rest ? 1 : 0);
}

std::string DataLoader::state() const {
  return dump_json(nlohmann::json{{"epoch", impl().coming.epoch},
                                  {"first", impl().coming.first},
                                  {"items", impl().size},
                                  {"shuffle", impl().options.shuffle},
                                  {"seed", impl().options.seed}});
}

void DataLoader::set_state(const std::string& state) {
  const auto json = parse_json(state, NoJson::kDiscard);
  const auto is = [&](const char* key, auto test) {
    return json.is_object() && json.contains(key) && test(json[key]);
  };
  const auto is_count = [](const nlohmann::json& value) { return value.is_number_unsigned(); };
  if (!(is("epoch", is_count) && is("first", is_count) && is("items", is_count) &&
        is("seed", is_count) && is("shuffle", [](auto& value) { return value.is_boolean(); }))) {
    throw_usage("this is no state of a loader: {}", state.substr(0, 200));
  }
  const auto compare = [](const char* what, auto saved, auto mine) {
    if (saved == mine) return;
    throw_usage("the state is of a loader with {} {}; this one has {}", what, saved, mine);
  };
  compare("items", json["items"].get<std::uint64_t>(), static_cast<std::uint64_t>(impl().size));
  compare("shuffle", json["shuffle"].get<bool>(), impl().options.shuffle);
  if (impl().options.shuffle) {
    compare("seed", json["seed"].get<std::uint64_t>(), impl().options.seed);
  }
  const auto first = json["first"].get<std::uint64_t>();
  if (first > static_cast<std::uint64_t>(impl().size)) {
    throw_usage("the state begins at item {} of {}", first, impl().size);
  }
  const Place place{json["epoch"].get<std::uint64_t>(), static_cast<std::int64_t>(first)};
  impl().require_shares(place.first);
  std::unique_lock lock = impl().begin_call();
  impl().go_to(lock, place);
}

}  // namespace sluice
