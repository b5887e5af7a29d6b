#include "runtime/report/job_gpus.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "tests/loopback/loopback.hpp"

namespace sluice {
namespace {

// Tags that nothing else uses here.
constexpr int kTags = 100;

double bf16(const char* card) {
  const std::optional<CardPeaks> peaks = peaks_of(card);
  return peaks ? flops_of(*peaks, MatmulPrecision::kBf16) : 0;
}

TEST(PeaksTest, KnowsCardsByTheirWholeNames) {
  EXPECT_EQ(bf16("NVIDIA H200"), 989.5e12);
  EXPECT_EQ(bf16("NVIDIA H200 NVL"), 835.5e12);
  const CardPeaks h100 = peaks_of("NVIDIA H100 80GB HBM3").value_or(CardPeaks{});
  EXPECT_EQ(flops_of(h100, MatmulPrecision::kTf32), 494.5e12);
  EXPECT_EQ(flops_of(h100, MatmulPrecision::kF32), 67e12);
  EXPECT_EQ(h100.bytes, 3.35e12);
  EXPECT_EQ(peaks_of("NVIDIA A100-PCIE-40GB").value_or(CardPeaks{}).bytes, 1.555e12);
  EXPECT_EQ(bf16("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(bf16("NVIDIA L4"), 121e12);
  for (const char* unknown : {"", "NVIDIA L40", "NVIDIA H1000", "NVIDIA H100", "Emulated GPU"}) {
    EXPECT_EQ(bf16(unknown), 0) << unknown;
  }
}

TEST(JobGpusTest, RanksOnCpusHaveNone) {
  run_loopback(3, [](Communicator& comm) {
    Collectives world(comm, kTags, nullptr);
    JobGpus gpus(world, "machine", Device{});
    EXPECT_EQ(gpus.peak(MatmulPrecision::kF32), 0);
    EXPECT_TRUE(gpus.read().empty());
  });
}

}  // namespace
}  // namespace sluice
