#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <thread>

#include <sluice/error.hpp>
#include <sluice/program.hpp>

#include "comm/group/control.hpp"
#include "comm/mpi/first_contact.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "runtime/entry/command.hpp"
#include "runtime/entry/start_limit.hpp"
#include "runtime/group/build_name.hpp"
#include "runtime/group/configuration.hpp"
#include "runtime/process/process.hpp"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;
// How long a failing rank waits until the others have failed as well.
constexpr auto kExitTime = std::chrono::milliseconds(1000);
// Time for the launcher to forward the last lines before the job ends.
constexpr auto kDrainTime = std::chrono::milliseconds(200);

// Does not return where a rank of the job does not answer.
void require_all_ranks(MpiSession& session, std::chrono::seconds limit) {
  if (!session.owns()) return;
  try {
    constexpr std::chrono::hours kForGood{24 * 365};
    make_first_contact(build_name(), limit.count() > 0 ? limit : kForGood);
  } catch (const Error& error) {
    // MPI_Finalize would wait for ranks that do not answer.
    const bool mine = error.rank() == std::max(launched_rank(), 0);
    if (mine) print_error(Error(error.code(), error.what(), -1, error.location()));
    std::this_thread::sleep_for(mine ? kDrainTime : kDrainTime + kExitTime);
    session.abort(exit_code(error.code()));
  }
}

// Everything that must outlive the body; destroyed in the right order before MPI ends.
struct Job {
  Job(int* argc, char*** argv, std::chrono::seconds limit) {
    {
      const StartLimit in_time("MPI_Init", limit);
      session.emplace(argc, argv);
    }
    require_all_ranks(*session, limit);
    const StartLimit in_time("making communicators", limit);
    world = session->world();
    exit_comm = world->duplicate();
    control = std::make_unique<ControlChannel>(*world);
  }
  std::optional<MpiSession> session;
  std::unique_ptr<Communicator> world;
  std::unique_ptr<Communicator> exit_comm;
  std::unique_ptr<ControlChannel> control;
};

bool wait_until(Communicator& comm, Request& request, Clock::time_point deadline,
                const KeepAlive& memory) {
  Waiter waiter(comm.local_size());
  while (!comm.test(request)) {
    if (Clock::now() > deadline) {
      comm.cancel(request);
      comm.keep(memory);
      return false;
    }
    waiter.pause();
  }
  return true;
}

// True on all ranks once every rank has called it; false where one did not in time.
bool all_ranks_reached_exit(Communicator& comm) {
  constexpr int kTag = 0;
  const auto deadline = Clock::now() + kExitTime;
  const auto note = std::make_shared<std::array<std::byte, 1>>();
  const auto send = [&](int peer) {
    Request request = comm.start_send(peer, kTag, *note);
    return wait_until(comm, request, deadline, note);
  };
  const auto receive = [&](int peer) {
    Request request = comm.post_recv(peer, kTag, *note);
    return wait_until(comm, request, deadline, note);
  };
  if (comm.rank() != 0) return send(0) && receive(0);
  for (int peer = 1; peer < comm.size(); ++peer) {
    if (!receive(peer)) return false;
  }
  bool all = true;
  for (int peer = 1; peer < comm.size(); ++peer) all = send(peer) && all;
  return all;
}

// Returns the exit code, or ends the job where other ranks may still be waiting.
int fail(Job& job, const Error& error) {
  const int rank = job.world->rank();
  if (job.world->size() == 1) {
    return print_error(Error(error.code(), error.what(), /*rank=*/-1, error.location()));
  }
  flush_stdout();
  const Error mine(error.code(), error.what(), error.rank() >= 0 ? error.rank() : rank,
                   error.location());
  // Rank 0 may be anywhere in the body. Pipelines have already agreed on their errors.
  const Error first = job.control->report(mine, kExitTime);
  if (first.rank() == rank) print_error(first);
  const int code = exit_code(first.code());
  bool all_here = false;
  try {
    all_here = all_ranks_reached_exit(*job.exit_comm);
  } catch (const Error&) {
    // A rank is gone; the job is aborted below.
  }
  // An error of usage on every rank leaves no message in flight, so MPI can end normally.
  if (all_here && first.code() == ErrorCode::kUsage) return code;
  // One rank aborts the job; the others do so only if that one cannot.
  std::this_thread::sleep_for(first.rank() == rank ? kDrainTime : kDrainTime + kExitTime);
  job.session->abort(code);
}

}  // namespace

int run_main(int argc, char** argv, const std::function<void(World& world)>& body) {
  std::optional<Job> job;
  try {
    job.emplace(&argc, &argv, start_time_limit());
  } catch (...) {
    return print_error(current_error());
  }
  try {
    body(*job->world);
    flush_stdout();
    return 0;
  } catch (...) {
    return fail(*job, current_error());
  }
}

int run_command(const std::string& command, const std::function<std::string()>& parse,
                const std::function<void(Communicator& world)>& body) {
  std::optional<Error> refusal;
  std::string help;
  try {
    help = parse();
  } catch (...) {
    refusal = current_error();
  }
  if (!help.empty()) {
    return run_guarded([&] {
      if (first_of_job()) std::fwrite(help.data(), 1, help.size(), stdout);
    });
  }
  if (refusal && launched_rank() < 0) return print_error(*refusal);
  char* no_arguments = nullptr;  // for MPI
  return run_main(0, &no_arguments, [&](World& ranks) {
    Communicator& world = communicator_of(ranks);
    // Before the error of `parse`: an option may be unknown because it is another command's.
    Collectives collectives(world, 0, nullptr);
    require_same_configuration(collectives, {{"command", command}});
    if (refusal) throw Error(*refusal);
    body(world);
  });
}

}  // namespace sluice
