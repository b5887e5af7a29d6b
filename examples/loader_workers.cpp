// 15 items in batches of 4, read by 3 threads: which thread read which item, and what happens where
// reading an item fails.   loader_workers
#include <cstdio>
#include <stdexcept>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
using namespace sluice;

struct Squares : Dataset {
  std::int64_t broken = -1;  // this item cannot be read
  std::int64_t size() const override { return 15; }
  BatchSpec spec() const override {
    return {.inputs = {{DType::kF32, {}}}, .targets = {{DType::kF32, {}}}};
  }
  void get(const ItemRequest& item, std::span<const Tensor> inputs,
           std::span<const Tensor> targets) const override {
    if (item.index == broken) throw std::runtime_error("the picture cannot be decoded");
    const auto x = static_cast<float>(item.index);
    std::uint32_t decoded = 0;  // takes a while, as decoding does
    for (std::uint64_t i = 0; i < 200'000; ++i) decoded ^= philox(item.random, i, 0)[0];
    inputs[0].at(0) = decoded == 0 ? 0 : x;
    targets[0].at(0) = x * x;
  }
};

void print(const LoadedBatch& batch) {
  for (std::size_t i = 0; i < batch.indices.size(); ++i) {
    std::printf("%s%2lld by worker %d", i == 0 ? "batch: " : ", ", (long long)batch.indices[i],
                batch.workers[i]);
  }
  std::printf("\n");
}

int main() {
  const auto data = std::make_shared<Squares>();
  DataLoader loader(data, {.batch_size = 4, .workers = 3});
  std::printf("in order\n");
  while (const LoadedBatch* batch = loader.next()) print(*batch);

  const auto broken = std::make_shared<Squares>();
  broken->broken = 6;
  DataLoader shuffled(broken, {.batch_size = 4, .shuffle = true, .seed = 1, .workers = 3});
  std::printf("shuffled; item 6 cannot be read\n");
  for (;;) {
    try {
      const LoadedBatch* batch = shuffled.next();
      if (batch == nullptr) break;
      print(*batch);
    } catch (const Error& error) {
      std::printf("%s; left out\n", error.what());
      shuffled.skip();
    }
  }
}
