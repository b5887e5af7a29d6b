// What a run prints at its end.
#pragma once

#include <filesystem>
#include <optional>

#include <sluice/communicator.hpp>
#include <sluice/pipeline.hpp>

#include "runtime/train/last_steps.hpp"
#include "runtime/train/schedule_choice.hpp"
#include "runtime/train/step_reports.hpp"
#include "runtime/train/train_data.hpp"
#include "runtime/train/train_options.hpp"

namespace sluice {

struct RunEnd {
  const TrainOptions& options;
  const TrainData& data;
  const ScheduleChoice& choice;
  const StepReports& reports;
  const LastSteps& last_steps;
  Communicator& world;
  const Pipeline& pipeline;
  bool stopped;                               // asked to, before the last step
  std::optional<std::filesystem::path> save;  // the last one; nothing without --save
};

// On rank 0.
void print_summary(const RunEnd& run);

}  // namespace sluice
