// Loaders over any number of workers: the same batches in the same order, errors at their place,
// and an end without waiting.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Item i has the input (i, a random word) and the target 10 i.
class Numbers : public Dataset {
 public:
  explicit Numbers(std::int64_t size, std::function<void(const ItemRequest&)> before = {})
      : size_(size), before_(std::move(before)) {}
  [[nodiscard]] std::int64_t size() const override { return size_; }
  [[nodiscard]] BatchSpec spec() const override {
    return {.inputs = {{DType::kI64, {2}}}, .targets = {{DType::kF32, {}}}};
  }
  void get(const ItemRequest& item, std::span<const Tensor> inputs,
           std::span<const Tensor> targets) const override {
    ++calls;
    if (before_) before_(item);
    if (!inputs.empty()) {
      inputs[0].as<std::int64_t>()[0] = item.index;
      inputs[0].as<std::int64_t>()[1] =
          philox(item.random, static_cast<std::uint64_t>(item.index), 0)[0];
    }
    if (!targets.empty()) targets[0].at(0) = static_cast<float>(10 * item.index);
  }

  mutable std::atomic<int> calls{0};

 private:
  std::int64_t size_;
  std::function<void(const ItemRequest&)> before_;
};

std::shared_ptr<Numbers> numbers(std::int64_t size,
                                 std::function<void(const ItemRequest&)> before = {}) {
  return std::make_shared<Numbers>(size, std::move(before));
}

using Indices = std::vector<std::int64_t>;

// The indices of a batch, after a look at its tensors.
Indices checked(const LoadedBatch& batch) {
  const auto count = static_cast<std::int64_t>(batch.indices.size());
  EXPECT_EQ(batch.inputs[0].shape(), (Shape{count, 2}));
  EXPECT_EQ(batch.targets[0].shape(), (Shape{count}));
  EXPECT_EQ(batch.workers.size(), batch.indices.size());
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t index = batch.indices[static_cast<std::size_t>(i)];
    EXPECT_EQ(batch.inputs[0].as<std::int64_t>()[2 * i], index);
    EXPECT_EQ(batch.targets[0].at(i), static_cast<float>(10 * index));
  }
  return batch.indices;
}

std::vector<Indices> epoch_of(DataLoader& loader) {
  std::vector<Indices> batches;
  while (const LoadedBatch* batch = loader.next()) batches.push_back(checked(*batch));
  return batches;
}

Indices joined(const std::vector<Indices>& batches) {
  Indices all;
  for (const Indices& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

Indices counted(std::int64_t size) {
  Indices all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

TEST(DataLoaderTest, BatchesAreTheSameWithAnyNumberOfWorkers) {
  for (const bool shuffle : {false, true}) {
    std::vector<std::vector<std::int64_t>> expected;
    for (const int workers : {0, 1, 3, 16}) {
      DataLoader loader(numbers(23), {.batch_size = 4,
                                      .shuffle = shuffle,
                                      .seed = 5,
                                      .workers = workers,
                                      .ahead = workers % 4});
      EXPECT_EQ(loader.batches(), 6);
      std::vector<std::vector<std::int64_t>> seen;
      for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
        EXPECT_EQ(loader.epoch(), epoch);
        std::int64_t first = 0;
        while (const LoadedBatch* batch = loader.next()) {
          EXPECT_EQ(batch->epoch, epoch);
          EXPECT_EQ(batch->first, first);
          EXPECT_EQ(batch->samples, first < 20 ? 4 : 3);
          first += batch->samples;
          const std::int64_t* values = batch->inputs[0].as<std::int64_t>();
          seen.emplace_back(values, values + batch->inputs[0].elements());
          (void)checked(*batch);
        }
        EXPECT_EQ(first, 23);
      }
      if (expected.empty()) expected = seen;
      EXPECT_EQ(seen, expected) << workers << " workers";
    }
  }
}

TEST(DataLoaderTest, AnEpochIsAPermutationByEpochAndSeed) {
  std::set<Indices> orders;
  for (const std::uint64_t seed : {1U, 2U}) {
    DataLoader loader(numbers(50), {.batch_size = 7, .shuffle = true, .seed = seed});
    for (int epoch = 0; epoch < 3; ++epoch) {
      Indices order = joined(epoch_of(loader));
      orders.insert(order);
      std::sort(order.begin(), order.end());
      EXPECT_EQ(order, counted(50));
    }
  }
  EXPECT_EQ(orders.size(), 6U);
}

// Over 6,000 epochs each item is first equally often: chi-squared over 6 places, 5 degrees.
TEST(DataLoaderTest, EveryItemIsEquallyOftenFirst) {
  std::vector<int> first(6);
  DataLoader loader(numbers(6), {.batch_size = 6, .shuffle = true});
  for (int epoch = 0; epoch < 6000; ++epoch) {
    ++first[static_cast<std::size_t>(epoch_of(loader)[0][0])];
  }
  double chi = 0;
  for (const int count : first) chi += (count - 1000.0) * (count - 1000.0) / 1000.0;
  EXPECT_LT(chi, 20.5);  // exceeded with probability 0.001, for one fixed seed
}

TEST(DataLoaderTest, TheLastBatchIsSmallerOrLeftOut) {
  DataLoader smaller(numbers(10), {.batch_size = 4, .workers = 2});
  EXPECT_THAT(epoch_of(smaller),
              ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7), ElementsAre(8, 9)));
  DataLoader dropped(numbers(10), {.batch_size = 4, .workers = 2, .drop_last = true});
  EXPECT_EQ(dropped.batches(), 2);
  for (int epoch = 0; epoch < 2; ++epoch) {
    EXPECT_THAT(epoch_of(dropped), ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7)));
  }
}

TEST(DataLoaderTest, ReplicasShareEachBatchAndRanksReadWhatTheyPass) {
  const auto share = [](int replica, bool inputs, bool targets) {
    return LoaderOptions{
        .batch_size = 5,
        .shuffle = true,
        .workers = 1,
        .share = {.replica = replica, .replicas = 2, .inputs = inputs, .targets = targets}};
  };
  DataLoader whole(numbers(12), {.batch_size = 5, .shuffle = true});
  DataLoader first(numbers(12), share(0, true, true)), second(numbers(12), share(1, true, true));
  DataLoader targets(numbers(12), share(1, false, true));
  LoaderOptions of_both = share(0, true, true);
  of_both.share.count = 2;
  DataLoader joint(numbers(12), of_both);
  const auto unread = numbers(12);
  DataLoader nothing(unread, share(0, false, false));
  while (const LoadedBatch* batch = whole.next()) {
    Indices both = checked(*first.next());
    const LoadedBatch* other = second.next();
    const LoadedBatch* last = targets.next();
    EXPECT_THAT(last->inputs, IsEmpty());
    EXPECT_EQ(last->targets[0].at(0), other->targets[0].at(0));
    EXPECT_EQ(last->indices, other->indices);
    both.insert(both.end(), other->indices.begin(), other->indices.end());
    EXPECT_EQ(both, batch->indices);
    EXPECT_EQ(checked(*joint.next()), batch->indices);
    const LoadedBatch* none = nothing.next();
    EXPECT_TRUE(none->inputs.empty() && none->targets.empty() && none->indices.empty());
    EXPECT_EQ(none->samples, batch->samples);
  }
  EXPECT_EQ(first.next(), nullptr);
  EXPECT_EQ(nothing.next(), nullptr);
  EXPECT_EQ(unread->calls, 0);
}

// Three items wait for each other: one worker alone would never return.
TEST(DataLoaderTest, WorkersReadAtTheSameTimeAndABatchSaysWhoReadWhat) {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<int> inside;
  const auto meet = [&](const ItemRequest& item) {
    std::unique_lock lock(mutex);
    if (item.epoch > 0 || item.index >= 3) return;
    inside.insert(item.worker);
    changed.notify_all();
    EXPECT_TRUE(
        changed.wait_for(lock, std::chrono::seconds(60), [&] { return inside.size() == 3; }));
  };
  DataLoader loader(numbers(15, meet), {.batch_size = 3, .workers = 3});
  const LoadedBatch* batch = loader.next();
  EXPECT_EQ(std::set<int>(batch->workers.begin(), batch->workers.end()), (std::set<int>{0, 1, 2}));
  for (int i = 0; i < 4; ++i) {
    for (const int worker : loader.next()->workers) EXPECT_TRUE(worker >= 0 && worker < 3);
  }
}

TEST(DataLoaderTest, WhatAnItemThrowsComesOutAtItsBatch) {
  for (const int workers : {0, 3}) {
    std::atomic<bool> broken{true};
    const auto fail = [&](const ItemRequest& item) {
      if (!broken) return;
      if (item.index == 7) throw std::runtime_error("no picture in 'seven.png'");
      if (item.index == 9) throw Error(ErrorCode::kIo, "a disk that fails");
      if (item.index == 11) throw 11;  // NOLINT: any type
    };
    DataLoader loader(numbers(14, fail), {.batch_size = 4, .workers = workers, .ahead = 3});
    EXPECT_THAT(checked(*loader.next()), ElementsAre(0, 1, 2, 3));
    for (int attempt = 0; attempt < 2; ++attempt) {
      expect_error(ErrorCode::kUser,
                   {"item 7 of the data set (batch from sample 4 of epoch 0, worker ",
                    "): no picture in 'seven.png'"},
                   [&] { (void)loader.next(); });
    }
    loader.skip();
    expect_error(ErrorCode::kIo, {"item 9 of the data set", ": a disk that fails"},
                 [&] { (void)loader.next(); });
    broken = false;  // the same batch again
    EXPECT_THAT(checked(*loader.next()), ElementsAre(8, 9, 10, 11));
    EXPECT_THAT(checked(*loader.next()), ElementsAre(12, 13));
    loader.skip();  // at the end: nothing
    EXPECT_EQ(loader.next(), nullptr);
    EXPECT_EQ(loader.epoch(), 1U);
    broken = true;
    (void)loader.next();
    loader.skip();
    broken = false;
    EXPECT_THAT(checked(*loader.next()), ElementsAre(8, 9, 10, 11));
  }
}

// Leaves the target, or half of the input, unwritten.
class Gaps : public Dataset {
 public:
  explicit Gaps(bool of_target) : of_target_(of_target) {}
  [[nodiscard]] std::int64_t size() const override { return 4; }
  [[nodiscard]] BatchSpec spec() const override {
    return {.inputs = {{DType::kF32, {2}}}, .targets = {{DType::kF32, {}}}};
  }
  void get(const ItemRequest& /*item*/, std::span<const Tensor> inputs,
           std::span<const Tensor> targets) const override {
    inputs[0].at(0) = 1;
    if (of_target_) inputs[0].at(1) = 1;
    if (!of_target_) targets[0].at(0) = 1;
  }

 private:
  bool of_target_;
};

TEST(DataLoaderTest, NumbersThatTheFirstItemLeavesUnwrittenAreNamed) {
  for (const int workers : {0, 2}) {
    for (const bool of_target : {false, true}) {
      DataLoader loader(std::make_shared<Gaps>(of_target), {.batch_size = 2, .workers = workers});
      const std::string text = of_target ? "leaves 1 of the 1 numbers of target 0"
                                         : "leaves 1 of the 2 numbers of input 0, f32 [2]";
      for (int attempt = 0; attempt < 2; ++attempt) {
        expect_error(ErrorCode::kUsage, {"item 0 of the data set", text},
                     [&] { (void)loader.next(); });
      }
    }
  }
}

TEST(DataLoaderTest, OneThatWasMovedFromHasNothing) {
  DataLoader loader(numbers(4), {.batch_size = 2});
  const std::string state = loader.state();
  DataLoader other = std::move(loader);
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { (void)loader.next(); }, [&] { loader.skip(); }, [&] { (void)loader.epoch(); },
           [&] { (void)loader.batches(); }, [&] { (void)loader.options(); },
           [&] { (void)loader.state(); }, [&] { loader.set_state(state); }}) {
    expect_error(ErrorCode::kUsage, {"was moved from"}, call);  // NOLINT: that is the test
  }
  EXPECT_THAT(checked(*other.next()), ElementsAre(0, 1));
}

// Workers read ahead: the items wait until they know whom to call.
TEST(DataLoaderTest, AnItemMayNotCallItsLoader) {
  using Call = void (*)(DataLoader&);
  for (const int workers : {0, 1}) {
    for (const Call call : {Call([](DataLoader& called) { (void)called.next(); }),
                            Call([](DataLoader& called) { called.skip(); }),
                            Call([](DataLoader& called) { called.set_state(called.state()); })}) {
      DataLoader* called = nullptr;
      std::atomic<bool> known = false, calls = true;
      const auto ask = [&](const ItemRequest&) {
        known.wait(false);
        if (calls) call(*called);
      };
      DataLoader loader(numbers(4, ask), {.batch_size = 2, .workers = workers});
      called = &loader;
      known = true;
      known.notify_all();
      expect_error(ErrorCode::kUsage,
                   {"item 0 of the data set", ": a loader is called by the item"},
                   [&] { (void)loader.next(); });
      calls = false;
      const LoadedBatch* batch = nullptr;
      while (batch == nullptr) {
        try {
          batch = loader.next();
        } catch (const Error&) {  // read again before `calls` changed
        }
      }
      EXPECT_THAT(checked(*batch), ElementsAre(0, 1));
    }
  }
}

TEST(DataLoaderTest, EndsWithoutWaitingWhereverTheWorkersAre) {
  for (int turn = 0; turn < 200; ++turn) {
    const auto fail = [&](const ItemRequest& item) {
      if (turn % 3 == 0 && item.index % 5 == 4) throw std::runtime_error("bad");
    };
    DataLoader loader(numbers(20, fail),
                      {.batch_size = 2, .shuffle = turn % 2 == 0, .workers = 4, .ahead = turn % 5});
    for (int batch = 0; batch < turn % 7; ++batch) {
      try {
        (void)loader.next();
      } catch (const Error&) {
        loader.skip();
      }
    }
    if (turn % 4 == 0) {
      DataLoader moved = std::move(loader);
      loader = DataLoader(numbers(3), {.workers = 2});
      EXPECT_EQ(loader.batches(), 3);
    }
  }
}

TEST(DataLoaderTest, ALoaderWithASavedStateGoesOnWithTheNextBatch) {
  for (const int workers : {0, 3}) {
    const LoaderOptions options{.batch_size = 3, .shuffle = true, .seed = 9, .workers = workers};
    DataLoader whole(numbers(10), options);
    std::vector<Indices> all;
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (Indices& batch : epoch_of(whole)) all.push_back(std::move(batch));
      all.emplace_back();  // the end of an epoch
    }
    for (std::size_t stop = 0; stop < all.size(); ++stop) {
      DataLoader loader(numbers(10), options), resumed(numbers(10), options);
      for (std::size_t i = 0; i < stop; ++i) (void)loader.next();
      (void)resumed.next();
      resumed.set_state(loader.state());
      for (std::size_t i = stop; i < all.size(); ++i) {
        const LoadedBatch* batch = resumed.next();
        EXPECT_EQ(batch == nullptr ? Indices{} : checked(*batch), all[i]) << stop << " " << i;
      }
    }
  }
}

TEST(DataLoaderTest, AStateGoesOnWithAnotherBatchSizeAndIsRefusedElsewhere) {
  DataLoader loader(numbers(10), {.batch_size = 3});
  (void)loader.next();
  const std::string state = loader.state();
  DataLoader wider(numbers(10), {.batch_size = 5});
  wider.set_state(state);
  EXPECT_THAT(epoch_of(wider), ElementsAre(ElementsAre(3, 4, 5, 6, 7), ElementsAre(8, 9)));
  EXPECT_EQ(epoch_of(wider).size(), 2U);
  const auto refuses = [&](std::int64_t size, const LoaderOptions& options, const std::string& text,
                           const std::string& part) {
    DataLoader other(numbers(size), options);
    expect_error(ErrorCode::kUsage, {part}, [&] { other.set_state(text); });
    EXPECT_EQ(other.next()->first, 0);  // as it was
  };
  refuses(11, {}, state, "a loader with items 10; this one has 11");
  refuses(10, {.shuffle = true}, state, "a loader with shuffle false; this one has true");
  DataLoader shuffled(numbers(10), {.shuffle = true, .seed = 3});
  refuses(10, {.shuffle = true, .seed = 4}, shuffled.state(), "seed 3; this one has 4");
  refuses(10, {.batch_size = 2, .share = {.replicas = 2}}, state,
          "the last batch of an epoch has 1");
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[1]"), std::string("{\"epoch\": 1}"),
        std::string(R"({"epoch":-1,"first":0,"items":10,"seed":0,"shuffle":false})"),
        std::string(R"({"epoch":0,"first":1.5,"items":10,"seed":0,"shuffle":false})")}) {
    refuses(10, {}, text, "this is no state of a loader");
  }
  refuses(10, {}, R"({"epoch":0,"first":11,"items":10,"seed":0,"shuffle":false})",
          "begins at item 11 of 10");
}

TEST(DataLoaderTest, OptionsThatCannotWorkAreRefused) {
  const auto refused = [](std::int64_t size, const LoaderOptions& options,
                          const std::string& part) {
    expect_error(ErrorCode::kUsage, {part}, [&] { DataLoader loader(numbers(size), options); });
  };
  refused(0, {}, "the data set has 0 items; legal: at least 1");
  refused(5, {.batch_size = 0}, "LoaderOptions::batch_size is 0");
  refused(5, {.workers = -1}, "LoaderOptions::workers is -1; legal: 0 to 1024");
  refused(5, {.ahead = 5000}, "LoaderOptions::ahead is 5000");
  refused(5, {.share = {.replicas = 0}}, "share.replicas is 0");
  refused(5, {.batch_size = 4, .share = {.replica = 2, .replicas = 2}}, "share.replica is 2");
  refused(5, {.batch_size = 4, .share = {.replicas = 2, .count = 3}}, "share.count is 3");
  refused(5, {.batch_size = 4, .share = {.replica = 1, .replicas = 2, .count = 2}},
          "share.replica is 1; legal: 0 to 0");
  refused(5, {.batch_size = 4, .share = {.replicas = 8, .count = 8}}, "for 8 virtual replicas");
  refused(5, {.share = {.replicas = 2}}, "batches of 1 samples for 2 replicas");
  refused(5, {.batch_size = 4, .share = {.replicas = 2}},
          "the last batch of an epoch has 1 of 5 items for 2 replicas; drop_last leaves it out");
  refused(5, {.batch_size = 6, .drop_last = true}, "drop_last leaves no batch");
  refused(std::int64_t{1} << 60, {.batch_size = std::int64_t{1} << 60}, "no memory for");
  refused(std::int64_t{1} << 60, {.shuffle = true}, "and the order of 1152921504606846976 items");
  expect_error(ErrorCode::kUsage, {"a loader needs a data set"},
               [] { DataLoader loader(nullptr, {}); });
  // A batch larger than the data set is the data set.
  DataLoader loader(numbers(5), {.batch_size = INT64_MAX, .workers = 1});
  EXPECT_THAT(epoch_of(loader), ElementsAre(ElementsAre(0, 1, 2, 3, 4)));
}

HostTensor rows(std::vector<float> values, const Shape& shape) {
  HostTensor made{.spec = {DType::kF32, shape}, .bytes = {}};
  const auto bytes = std::as_bytes(std::span(values));
  made.bytes.assign(bytes.begin(), bytes.end());
  return made;
}

TEST(ArrayDatasetTest, ItemsAreTheRowsOfTheArrays) {
  const auto data = make_array_dataset({rows({1, 2, 3, 4, 5, 6}, {3, 2})}, {rows({7, 8, 9}, {3})});
  EXPECT_EQ(data->size(), 3);
  EXPECT_EQ(data->spec().inputs[0], (TensorSpec{DType::kF32, {2}}));
  EXPECT_EQ(data->spec().targets[0], (TensorSpec{DType::kF32, {}}));
  DataLoader loader(data, {.batch_size = 2});
  (void)loader.next();
  const LoadedBatch* batch = loader.next();
  EXPECT_THAT(batch->inputs[0].floats(), ElementsAre(5, 6));
  EXPECT_THAT(batch->targets[0].floats(), ElementsAre(9));
}

TEST(ArrayDatasetTest, ArraysThatDoNotFitAreRefused) {
  const auto refused = [](std::vector<HostTensor> inputs, std::vector<HostTensor> targets,
                          const std::string& part) {
    expect_error(ErrorCode::kUsage, {part},
                 [&] { (void)make_array_dataset(std::move(inputs), std::move(targets)); });
  };
  refused({}, {}, "a data set needs an array of inputs");
  refused({rows({1}, {})}, {}, "array f32 [] of a data set has no samples");
  refused({rows({}, {0, 2})}, {}, "array f32 [0, 2] of a data set has no samples");
  refused({rows({1, 2}, {2})}, {rows({1, 2, 3}, {3})}, "different numbers of samples: f32 [2] and");
  HostTensor cut = rows({1, 2}, {2});
  cut.bytes.pop_back();
  refused({cut}, {}, "has 7 bytes; legal: 8");
}

}  // namespace
}  // namespace sluice
