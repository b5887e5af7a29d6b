// The GPUs of a job: what they could compute at most, and what their drivers measure. Where the
// time of a job's operators goes.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/device.hpp>
#include <sluice/tensor.hpp>

#include "comm/device/gpu_monitor.hpp"
#include "comm/group/collectives.hpp"

namespace sluice {

// Operands of matmuls: fp32, TF32 (f32 tensors, rounded in matmuls) or bf16.
enum class MatmulPrecision { kF32, kTf32, kBf16 };

// What a card reaches at most by NVIDIA's data sheet: floating-point operations a second of dense
// matmuls, and bytes a second of its memory.
struct CardPeaks {
  double bf16 = 0, tf32 = 0, fp32 = 0, bytes = 0;
};
// By DeviceProperties::name; nothing for a card that the table does not have.
[[nodiscard]] std::optional<CardPeaks> peaks_of(std::string_view card);
[[nodiscard]] double flops_of(const CardPeaks& card, MatmulPrecision precision);

class JobGpus {
 public:
  // Collective over `world`, which outlives this. `machine` is the same in all processes of a
  // machine; `device`: this rank's.
  JobGpus(Collectives& world, const std::string& machine, Device device,
          const std::string& library = GpuMonitor::kLibrary);

  // The sum over the job's GPUs, each counted once. 0 where a rank has none, or one that is not in
  // the table. The same on all ranks.
  [[nodiscard]] double peak(MatmulPrecision precision) const;
  // Of the card that all ranks have; nothing where they differ or it is not in the table.
  [[nodiscard]] std::optional<CardPeaks> card() const;

  // Collective. [rank of the job] on rank 0, else empty. Empty where no driver of the job answers;
  // ranks then exchange nothing.
  [[nodiscard]] std::vector<GpuState> read();

 private:
  Collectives& world_;
  GpuMonitor monitor_;
  std::vector<std::string> cards_;  // names, each GPU once; "" for a rank without one
  bool any_works_ = false;
};

// Collective. The sums over all ranks of `mine`, by name, the longest first; on every rank.
[[nodiscard]] std::vector<OperatorTime> sum_operator_times(Collectives& world,
                                                           const std::vector<OperatorTime>& mine);

struct OperatorReport {
  int steps = 0;            // in which the times were measured
  double rank_seconds = 0;  // those steps' seconds times ranks
  MatmulPrecision precision = MatmulPrecision::kF32;
  // Of the card that all ranks have; the table then has a column for the share of the time in which
  // it could have moved the bytes and computed the matmuls.
  std::optional<CardPeaks> card = {};
};

// A line per operator: calls, milliseconds and share of the ranks' time, speeds, share of the
// roofline. Its lines end in newlines.
[[nodiscard]] std::string operator_table(const std::vector<OperatorTime>& times,
                                         const OperatorReport& report);

}  // namespace sluice
