#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>

#include <sluice/program.hpp>
#include <sluice/schedule.hpp>

#include "comm/group/collectives.hpp"
#include "comm/group/topology.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "runtime/cli/commands.hpp"
#include "runtime/cli/diagnosis.hpp"
#include "runtime/cli/host_check.hpp"
#include "runtime/cli/train_options.hpp"
#include "runtime/layout/device_choice.hpp"
#include "runtime/layout/edge_route.hpp"
#include "runtime/options/option_table.hpp"
#include "runtime/options/process.hpp"

namespace sluice {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr int kBaseTag = 0;
constexpr const char* kAbout =
    "Says where every rank of a job runs, which stages it would own, and what looks wrong. Start "
    "it\n"
    "as the training would be started:\n"
    "\n"
    "  mpirun -n 4 sluice doctor --pipeline 2 --replicas 2 --threads 1\n"
    "\n"
    "With --hosts it needs no mpirun: it asks each host over SSH whether a job can start there.";

struct DoctorOptions {
  int pipeline = 0, replicas = 1, chunks = 1, threads = 1;
  RankOrder rank_order = RankOrder::kPipelineFirst;
  std::string device = "auto";
  TransportChoice transport = TransportChoice::kAuto;
  HostCheckOptions hosts;
};

OptionTable make_table(DoctorOptions& options) {
  OptionTable table("sluice doctor [options]", kAbout);
  table.add_integer("pipeline", options.pipeline, 1, kMaxInt,
                    "ranks of one pipeline; auto: ranks / replicas", "auto");
  table.add_integer("replicas", options.replicas, 1, kMaxInt, "pipelines that share each batch");
  table.add_integer("chunks", options.chunks, 1, 1024, "stages per rank");
  add_rank_order(table, options.rank_order);
  table.add_integer("threads", options.threads, 1, 4096, "per rank");
  table.add_text("device", options.device, "LIST", "as of 'sluice train'");
  add_transport(table, options.transport, "as of 'sluice train'");
  table.heading("Before mpirun");
  table.add_text("hosts", options.hosts.hosts, "FILE",
                 "a host file of mpirun: asks its hosts, without MPI, and does nothing else");
  table.add_text("ssh", options.hosts.ssh, "COMMAND", "reaches a host for --hosts");
  return table;
}

Topology topology_of(const DoctorOptions& options, int ranks) {
  const int pipeline =
      options.pipeline > 0 ? options.pipeline : std::max(1, ranks / options.replicas);
  return make_topology(ranks, pipeline, options.replicas, options.rank_order);
}

RankFacts facts_of(int rank, int threads, const RankDevice& device) {
  RankFacts facts = local_facts();
  facts.device = to_string(device.device);
  facts.device_identity = device.identity;
  facts.gpu = describe_gpu(device.device);
  if (!device.no_gpu.empty() && built_with_cuda()) facts.no_gpu = device.no_gpu;
  facts.rank = rank;
  facts.mpi = mpi_info();
  facts.threads = threads;
  return facts;
}

void print_job(const RankFacts& facts, const Topology& topology) {
  fmt::print("ranks      {} = pipeline {} x replicas {}\n", topology.ranks(), topology.pipeline,
             topology.replicas);
  fmt::print("MPI        {}, standard {}, thread level {}, tags up to {}\n", facts.mpi.library,
             facts.mpi.standard, facts.mpi.thread_level, facts.mpi.tag_upper_bound);
  fmt::print("transport  {}\n", facts.mpi.components.empty()
                                    ? "chosen by MPI (nothing asked for in the environment)"
                                    : facts.mpi.components);
  if (built_with_cuda()) {
    fmt::print("GPUs       {}\n", facts.gpu.empty() ? facts.no_gpu : facts.gpu);
  }
  fmt::print("kernels    {}\n", facts.kernel_set);
  fmt::print("matrices   {}\n\n", facts.matmul_library);
}

void print_ranks(const std::vector<RankFacts>& ranks, const Topology& topology, int chunks) {
  std::size_t host_width = 4;
  for (const RankFacts& rank : ranks) host_width = std::max(host_width, rank.mpi.host.size());
  fmt::print("{:>5}  {:<{}}  {:<7}  {:>5}  {:>10}  {:>7}  {:>7}  stages\n", "rank", "host",
             host_width, "device", "cores", "host cores", "threads", "replica");
  const Placement placement = Placement::looped(topology.pipeline, chunks);
  for (const RankFacts& rank : ranks) {
    fmt::print("{:>5}  {:<{}}  {:<7}  {:>5}  {:>10}  {:>7}  {:>7}  {} of {}\n", rank.rank,
               rank.mpi.host, host_width, rank.device, rank.mpi.cores, rank.host_cores,
               rank.threads, topology.replica(rank.rank),
               fmt::join(placement.stages_of(topology.pipeline_rank(rank.rank)), ", "),
               placement.stages());
  }
}

void print_findings(const std::vector<Finding>& findings) {
  fmt::print("\nWhat looks wrong, and what to do:\n");
  bool any = false;
  for (const Finding& finding : findings) {
    if (!finding.wrong) continue;
    fmt::print("  ! {}\n", finding.text);
    any = true;
  }
  if (!any) fmt::print("  nothing\n");
  bool first = true;
  for (const Finding& finding : findings) {
    if (finding.wrong) continue;
    if (first) fmt::print("\nGood to know:\n");
    first = false;
    fmt::print("  - {}\n", finding.text);
  }
}

void examine(const DoctorOptions& options, Communicator& world) {
  const Topology topology = topology_of(options, world.size());
  Collectives collectives(world, kBaseTag, nullptr);
  const std::vector<RankDevice> devices =
      choose_devices(collectives, topology, parse_devices(options.device));
  RankFacts mine =
      facts_of(world.rank(), options.threads, devices[static_cast<std::size_t>(world.rank())]);
  mine.no_device_messages = why_no_device_messages(
      collectives, devices, options.transport,
      find_why_no_nccl(collectives, devices, options.transport), topology.pipeline);
  const std::vector<std::string> all = collectives.all_gather_strings(to_json_text(mine));
  if (world.rank() != 0) return;
  std::vector<RankFacts> ranks;
  for (const std::string& text : all) ranks.push_back(rank_facts_from_json(text));
  print_job(ranks.front(), topology);
  print_ranks(ranks, topology, options.chunks);
  print_findings(diagnose(ranks));
}

}  // namespace

int doctor_command(int argc, char** argv) {
  DoctorOptions options;
  OptionTable table = make_table(options);
  const std::vector<std::string> arguments(argv, argv + argc);
  const auto asks_hosts = [](const std::string& word) { return word.starts_with("--hosts"); };
  if (launched_rank() < 0 && std::any_of(arguments.begin(), arguments.end(), asks_hosts)) {
    return run_guarded(table, arguments, [&] { check_hosts(options.hosts); });
  }
  return run_command(
      "doctor", argc, argv,
      [&] {
        table.parse(arguments);
        if (table.given("hosts")) {
          throw Error(ErrorCode::kUsage, "--hosts is for 'sluice doctor' started without mpirun");
        }
        return table.help_wanted() ? table.help() : "";
      },
      [&](Communicator& world) { examine(options, world); });
}

}  // namespace sluice
