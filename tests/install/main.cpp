// An MPI program of somebody else: it keeps its main, hands us its communicator, and draws a
// schedule. Ends with 0 if all of it worked.
#include <mpi.h>

#include <cstdio>
#include <memory>
#include <string>

#include <sluice/draw.hpp>
#include <sluice/generate.hpp>
#include <sluice/mpi.hpp>
#include <sluice/options.hpp>
#include <sluice/schedule.hpp>

#include "runtime/cli/train_options.hpp"

int main(int argc, char** argv) {
  int granted = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &granted);
  bool right = false;
  {
    const std::unique_ptr<sluice::Communicator> world =
        sluice::make_mpi_communicator(MPI_COMM_WORLD);
    const sluice::ParsedTrain parsed =
        sluice::parse_train_options({"--pipeline", "2", "--schedule", "gpipe", "--dry-run"});
    const sluice::Schedule schedule = sluice::generate(
        parsed.options.schedule, {.ranks = parsed.options.pipeline, .micro_batches = 4});
    std::printf("%s", sluice::draw_grid(schedule).c_str());
    right = world->size() == 1 && !sluice::check(schedule) && parsed.options.pipeline == 2;
  }
  MPI_Finalize();
  return right ? 0 : 1;
}
