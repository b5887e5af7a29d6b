// `sluice train` once MPI is up: data, pipeline, steps, validation, reports, weights, summary.
#pragma once

#include <string>

#include <sluice/communicator.hpp>
#include <sluice/pipeline.hpp>

#include "comm/mpi/mpi_session.hpp"
#include "runtime/cli/train_options.hpp"

namespace sluice {

struct JobLayout;  // runtime/layout/job_layout.hpp

// Collective over `world`. Throws the same Error on every rank. With options.dry_run prints the
// layout and memory per rank and returns.
void run_training(const MpiInfo& machine, Communicator& world, const TrainOptions& options);

}  // namespace sluice
