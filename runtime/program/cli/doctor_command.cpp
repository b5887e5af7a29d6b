#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <sstream>
#include <utility>

#include <sluice/compute.hpp>
#include <sluice/data.hpp>
#include <sluice/parameter.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/schedule.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/host.hpp"
#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/clock_offset.hpp"
#include "comm/group/collectives.hpp"
#include "comm/group/topology.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "runtime/entry/command.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/files/writable.hpp"
#include "runtime/group/build_name.hpp"
#include "runtime/group/collective_costs.hpp"
#include "runtime/layout/device_choice.hpp"
#include "runtime/layout/edge_route.hpp"
#include "runtime/layout/rank_arrangement.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/process/process.hpp"
#include "runtime/program/cli/commands.hpp"
#include "runtime/program/doctor/collective_probe.hpp"
#include "runtime/program/doctor/diagnosis.hpp"
#include "runtime/program/doctor/host_check.hpp"
#include "runtime/program/doctor/live_status.hpp"
#include "runtime/program/doctor/network_probe.hpp"
#include "runtime/program/explore/cluster_file.hpp"
#include "runtime/program/options/option_table.hpp"
#include "runtime/program/train/train_options.hpp"
#include "runtime/report/layout_report.hpp"

namespace sluice {
namespace {

constexpr int kBaseTag = 0, kProbeTag = Collectives::kTags;
// Longer than an unusable name server or a slow file system keeps a rank, or a step of the
// self-test.
constexpr double kSilenceSeconds = 60;
constexpr std::size_t kMostShown = 40;  // links in the table
constexpr double kShownSum = 1 << 20;   // bytes
constexpr const char* kAboutDoctor =
    R"(Says where every rank of a job runs, which stages it would own, how quick the links between
ranks are, and what looks wrong. Start it as the training would be started:

  mpirun -n 4 sluice doctor --pipeline 2 --replicas 2 --threads 1 --data text.txt --save run

With --output it writes the links for 'sluice schedule --cluster FILE'. Apart from that file
it leaves nothing behind.

With --hosts it needs no mpirun: it asks each host over SSH whether a job can start there.

With --self-test it trains one step over all ranks and compares the digest of the parameters
with that of one rank; without mpirun it starts two ranks on this host by itself.)";

struct DoctorOptions {
  int pipeline = 0, replicas = 1, tensor = 1, chunks = 1, threads = 1;
  RankOrder rank_order = RankOrder::kAuto;
  std::vector<DeviceChoice> devices = {{.kind = DeviceChoice::Kind::kAuto}};
  TransportChoice transport = TransportChoice::kAuto;
  std::string data, save, output, hosts, live, ssh = "ssh";
  double probe_seconds = 20;
  bool self_test = false;
};

OptionTable make_table(DoctorOptions& options) {
  OptionTable table("sluice doctor [options]", kAboutDoctor);
  table.add_integer("pipeline", options.pipeline, 1, kMaxInt,
                    "ranks of one pipeline; auto: ranks / replicas / tensor", "auto");
  table.add_integer("replicas", options.replicas, 1, kMaxInt, "pipelines that share each batch");
  table.add_integer("tensor", options.tensor, 1, kMaxInt, "ranks that share each stage");
  table.add_integer("chunks", options.chunks, 1, 1024, "stages per rank");
  add_rank_order(table, options.rank_order);
  table.add_integer("threads", options.threads, 1, ComputeContext::kMostThreads, "per rank");
  add_devices(table, options.devices, "as of 'sluice train'");
  add_transport(table, options.transport, "as of 'sluice train'");
  table.add_text("data", options.data, "FILE", "compare what the hosts see under this path");
  table.add_text("save", options.save, "DIR",
                 "measure writing there, and whether all hosts see the same directory");
  table.add_real(
      "probe-seconds", options.probe_seconds, {.low = 0, .high = 86400},
      "for measuring pairs of ranks, about 0.25 s each; 0: measure nothing, sums neither");
  table.add_text("output", options.output, "FILE",
                 "write hosts, ranks and links for 'sluice schedule --cluster'");
  table.add_flag("self-test", options.self_test,
                 "train a step over 2 ranks or more and compare its bits; uses --device alone");
  table.heading("Before mpirun");
  table.add_text(
      "hosts", options.hosts, "FILE",
      "a host file of mpirun: asks its hosts over SSH, with --data and --save; no probes");
  table.add_text("ssh", options.ssh, "COMMAND", "reaches a host for --hosts");
  table.heading("While a job runs");
  table.add_text("live", options.live, "DIR",
                 "what each rank of the job does that saves in DIR; started without mpirun");
  return table;
}

// The sizes of messages are not known: a training may choose another order.
RankArrangement arrangement_of(const DoctorOptions& options, const std::vector<std::string>& hosts,
                               RankOrder asked_order) {
  const int ranks = static_cast<int>(hosts.size());
  const int pipeline = options.pipeline > 0
                           ? options.pipeline
                           : std::max(1, ranks / options.replicas / options.tensor);
  const Topology numbered = make_topology(
      ranks, {.pipeline = pipeline, .replica = options.replicas, .tensor = options.tensor},
      asked_order);
  PipelineOptions asked;
  asked.shape.rank_order = asked_order;
  asked.devices.choices = options.devices;
  RankArrangement order =
      arrange_ranks(numbered, asked, Placement::looped(pipeline, options.chunks), hosts);
  if (!order.reason.empty() && pipeline > 1 && options.replicas > 1) {
    order.reason += "; a training knows its sizes and may choose otherwise (--rank-order fixes it)";
  }
  return order;
}

void print_job(const RankFacts& facts, const RankArrangement& order) {
  const Topology& topology = order.topology;
  fmt::print("ranks      {} = pipeline {} x replicas {}{}\n", topology.ranks(),
             topology.size.pipeline, topology.size.replica,
             topology.size.tensor > 1 ? fmt::format(" x tensor {}", topology.size.tensor) : "");
  if (!order.reason.empty()) fmt::print("order      {}\n", order.reason);
  fmt::print("MPI        {}, standard {}, thread level {}, tags up to {}\n", facts.mpi.library,
             facts.mpi.standard, facts.mpi.thread_level, facts.mpi.tag_upper_bound);
  const LauncherFacts& launcher = facts.launcher;
  if (!launcher.pmix.empty() || !launcher.pmix_of.empty()) {
    const auto or_unknown = [](const std::string& version) {
      return version.empty() ? "unknown" : version;
    };
    fmt::print("PMIx       {} of the launcher, {} of the MPI library\n", or_unknown(launcher.pmix),
               or_unknown(launcher.pmix_of));
  }
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
  const Placement placement = Placement::looped(topology.size.pipeline, chunks);
  std::vector<RankRow> rows;
  for (const RankFacts& rank : ranks) {
    rows.push_back({.host = rank.mpi.host,
                    .device = rank.device,
                    .replica = topology.place_of(rank.rank).replica,
                    .stages = placement.stages_of(topology.place_of(rank.rank).pipeline),
                    .cores = rank.limits.cores,
                    .host_cores = rank.host_cores,
                    .threads = rank.threads,
                    .interfaces = interfaces_used(rank.network),
                    .tensor = topology.size.tensor > 1 ? topology.place_of(rank.rank).tensor : -1});
  }
  fmt::print("{}", rank_table(rows, ""));
}

// The slowest where there are too many.
void print_links(const std::vector<RankFacts>& ranks, std::vector<LinkFigures> links) {
  if (links.empty()) return;
  fmt::print(
      "\nLinks that the training uses: latency one way and bandwidth of one pair of ranks at "
      "a time,\nbandwidth while all carry messages, and how much of a message passes while "
      "ranks compute\n");
  fmt::print("{:>5}  {:>5}  {:>9}  {:>11}  {:>11}  {:>7}  over\n", "from", "to", "latency", "alone",
             "all at once", "passes");
  const std::size_t all = links.size();
  if (all > kMostShown) {
    std::ranges::stable_sort(links, {}, &LinkFigures::bandwidth);
    links.resize(kMostShown);
  }
  for (const LinkFigures& link : links) {
    fmt::print("{:>5}  {:>5}  {:>6.1f} us  {:>11}  {:>11}  {:>5.0f} %  {}\n", link.from, link.to,
               link.latency * 1e6, bandwidth_text(link.bandwidth),
               bandwidth_text(link.shared_bandwidth), link.advanced * 100,
               way_of(ranks[at(link.from)], ranks[at(link.to)]));
  }
  if (all > kMostShown) fmt::print("the {} slowest of {}\n", kMostShown, all);
}

// Likewise.
void print_collectives(CollectiveResult result) {
  if (result.groups.empty()) return;
  fmt::print(
      "\nGathers and ordered sums of {} KiB over the replicas of each stage, in host memory, all "
      "stages at once:\nbytes that a rank receives, and their share of the speed of plain messages "
      "by all ranks at once\n{:>11}  {:>5}  {:>11}  {:>5}  ranks\n",
      result.bytes >> 10, "gather", "share", "sum", "share");
  const std::size_t all = result.groups.size();
  if (all > kMostShown) {
    std::ranges::stable_sort(result.groups, {}, &CollectiveFigures::sum);
    result.groups.resize(kMostShown);
  }
  for (const CollectiveFigures& each : result.groups) {
    fmt::print("{:>11}  {:>5.2f}  {:>11}  {:>5.2f}  {}\n", bandwidth_text(each.gather),
               each.gather_share, bandwidth_text(each.sum), each.sum_share,
               joined(each.ranks, ", "));
  }
  if (all > kMostShown) fmt::print("the {} slowest of {}\n", kMostShown, all);
}

// Where ranks share stages: of each group the costs of the slowest of its ranks. `costs` [rank];
// empty: not measured.
std::vector<TensorGroup> tensor_groups(const Topology& topology,
                                       const std::vector<CollectiveCosts>& costs) {
  std::vector<TensorGroup> groups;
  if (topology.size.tensor == 1) return groups;
  for (const std::vector<int>& ranks : topology.groups(Axis::kTensor)) {
    TensorGroup& group = groups.emplace_back(TensorGroup{.ranks = ranks, .costs = {}});
    for (const int rank : ranks) {
      if (!costs.empty()) group.costs = slower(group.costs, costs[at(rank)]);
    }
  }
  return groups;
}

// Likewise.
void print_tensor_groups(std::vector<TensorGroup> groups) {
  if (groups.empty()) return;
  const auto sum = [](const TensorGroup& group) { return seconds_of_sum(group, kShownSum); };
  const auto cost = [](const LinkCost& of) {
    return fmt::format("{:>6.0f} us  {:>11}", of.latency * 1e6, bandwidth_text(of.bandwidth));
  };
  fmt::print(
      "\nCollectives over MPI of the ranks that share a stage, between products of CPUs, with "
      "waits for later\nranks, all stages at once: a small one, bytes per second that a rank "
      "passes in large ones, and a sum of 1 MiB\n{:>22}  {:>22}  {:>22}  {:>9}  ranks\n",
      "sum", "reduce-scatter", "all-gather", "1 MiB");
  const std::size_t all = groups.size();
  if (all > kMostShown) {
    std::ranges::stable_sort(groups, std::greater<>(), sum);
    groups.resize(kMostShown);
  }
  for (const TensorGroup& each : groups) {
    const auto of = [&](CollectiveKind kind) {
      return cost(each.costs[at(static_cast<int>(kind))]);
    };
    fmt::print("{:>22}  {:>22}  {:>22}  {:>6.2f} ms  {}\n", of(CollectiveKind::kSum),
               of(CollectiveKind::kReduceScatter), of(CollectiveKind::kAllGather), 1e3 * sum(each),
               joined(each.ranks, ", "));
  }
  if (all > kMostShown) fmt::print("the {} slowest of {}\n", kMostShown, all);
}

void print_findings(const std::vector<Finding>& findings) {
  std::string wrong, notes;
  for (const Finding& finding : findings) {
    (finding.wrong ? wrong : notes) +=
        fmt::format("  {} {}\n", finding.wrong ? '!' : '-', finding.text);
  }
  fmt::print("\nWhat looks wrong, and what to do:\n{}", wrong.empty() ? "  nothing\n" : wrong);
  if (!notes.empty()) fmt::print("\nGood to know:\n{}", notes);
}

std::vector<Finding> all_findings(const std::vector<RankFacts>& ranks, const ProbeResult& probe,
                                  const std::vector<Finding>& of_sums,
                                  const std::vector<TensorGroup>& groups) {
  std::vector<Finding> findings = diagnose(ranks);
  for (const auto& more : {diagnose_tensor_groups(ranks, groups), of_sums,
                           diagnose_network(ranks, probe), diagnose_files(ranks)}) {
    findings.insert(findings.end(), more.begin(), more.end());
  }
  return findings;
}

Cluster cluster_of(const std::vector<RankFacts>& ranks, const Topology& topology,
                   const ProbeResult& probe, const std::vector<TensorGroup>& groups) {
  Cluster cluster;
  cluster.sluice = build_name();
  cluster.mpi = ranks.front().mpi.library;
  cluster.pipeline = topology.size.pipeline;
  cluster.replicas = topology.size.replica;
  cluster.tensor = topology.size.tensor;
  for (const RankFacts* host : first_of_hosts(ranks)) {
    cluster.hosts.push_back({host->mpi.host, host->host_cores});
  }
  for (const RankFacts& rank : ranks) {
    const auto host = std::ranges::find(cluster.hosts, rank.mpi.host, &ClusterHost::name);
    cluster.ranks.push_back(
        {static_cast<int>(host - cluster.hosts.begin()), topology.place_of(rank.rank).replica,
         topology.place_of(rank.rank).pipeline, topology.place_of(rank.rank).tensor});
  }
  CollectiveCosts slowest;
  for (const TensorGroup& each : groups) slowest = slower(slowest, each.costs);
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    const LinkCost& cost = slowest[at(kind)];
    if (!(cost.bandwidth > 0)) continue;  // not measured
    cluster.collectives.push_back(
        {static_cast<CollectiveKind>(kind), cost.latency, std::max(cost.bandwidth, 1.0)});
  }
  for (const LinkFigures& link : probe.links) {
    const std::string way = way_of(ranks[at(link.from)], ranks[at(link.to)]);
    cluster.links.push_back({link.from, link.to, link.latency, std::max(link.bandwidth, 1.0),
                             link.shared_bandwidth, link.advanced, way});
  }
  cluster.pairs_left_out = probe.pairs_left_out;
  return cluster;
}

std::vector<Finding> findings_of_sums(const DoctorOptions& options, const Topology& topology,
                                      const std::vector<std::string>& hosts,
                                      const std::vector<RankDevice>& devices) {
  std::vector<std::pair<std::string, Topology>> others;
  for (const auto& [name, order] :
       {std::pair("auto", RankOrder::kAuto), std::pair("pipeline-first", RankOrder::kPipelineFirst),
        std::pair("replica-first", RankOrder::kReplicaFirst)}) {
    others.emplace_back(name, arrangement_of(options, hosts, order).topology);
  }
  return diagnose_sums(topology, devices, others);
}

// Collective: all facts of this rank.
RankFacts gather_facts(const DoctorOptions& options, const Topology& topology,
                       const std::vector<std::string>& hosts,
                       const std::vector<RankDevice>& devices, Collectives& collectives) {
  const int rank = collectives.communicator().rank();
  const RankDevice& device = devices[at(rank)];
  RankFacts mine = local_facts();
  mine.device = to_string(device.device);
  mine.device_identity = device.identity;
  mine.gpu = describe_gpu(device.device);
  if (!device.no_gpu.empty() && built_with_cuda()) mine.no_gpu = device.no_gpu;
  mine.rank = rank;
  mine.mpi = mpi_info();
  mine.threads = options.threads;
  mine.no_device_messages = why_no_device_messages(
      collectives, devices, options.transport,
      find_why_no_nccl(collectives, devices, options.transport), topology.size.pipeline);
  if (!options.data.empty()) mine.data = data_facts(options.data);
  if (!options.save.empty()) mine.save = probe_directory(collectives, hosts, options.save);
  return mine;
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// [rank of the job] Collective. Empty where no ranks share stages.
std::vector<CollectiveCosts> probe_tensor_ranks(Collectives& job, SilenceLimit& silence,
                                                const Topology& topology,
                                                const std::vector<RankDevice>& devices,
                                                const DoctorOptions& options) {
  if (topology.size.tensor == 1) return {};
  const Place place = topology.place_of(job.communicator().rank());
  const auto group =
      job.communicator().split(topology.group_number(Axis::kTensor, place), place.tensor);
  Collectives ranks(*group, 0, &silence);
  ranks.sums().set_hosts(hosts_of(devices, topology.group(Axis::kTensor, place)));
  std::vector<CollectiveCosts> all(at(job.communicator().size()));
  ComputeContext compute(Device{}, options.threads);
  job.all_gather(
      measure_collectives(job, ranks, compute, std::min(options.probe_seconds, kCollectiveSeconds)),
      all);
  return all;
}

void examine(const DoctorOptions& options, Communicator& world) {
  if (world.rank() == 0 && !options.output.empty()) require_writable_file(options.output);
  SilenceLimit silence(world.rank(), kSilenceSeconds, "the other ranks");
  Collectives collectives(world, kBaseTag, &silence);
  const std::vector<std::string> hosts = collectives.all_gather_strings(host_name());
  const RankArrangement order = arrangement_of(options, hosts, options.rank_order);
  const Topology& topology = order.topology;
  const std::vector<RankDevice> devices =
      choose_devices(collectives, topology, options.devices, hosts);
  RankFacts mine = gather_facts(options, topology, hosts, devices, collectives);
  ProbeResult probe;
  CollectiveResult sums;
  std::vector<CollectiveCosts> costs;
  if (options.probe_seconds > 0) {
    probe = probe_links(world, kProbeTag, pairs_of_training(topology, options.chunks),
                        {.total_seconds = options.probe_seconds});
    sums = probe_collectives(world, kProbeTag, topology, devices);
    silence.restart();
    costs = probe_tensor_ranks(collectives, silence, topology, devices, options);
  }
  mine.network.connections = tcp_connections();
  const ClockOffset clock = measure_clock_offset(collectives, wall_seconds);
  mine.clock_ahead = clock.offset;
  mine.clock_error = clock.error;
  silence.restart();
  const std::vector<std::string> all = collectives.all_gather_strings(to_json_text(mine));
  if (world.rank() != 0) return;
  std::vector<RankFacts> ranks;
  for (const std::string& text : all) ranks.push_back(rank_facts_from_json(text));
  print_job(ranks.front(), order);
  print_ranks(ranks, topology, options.chunks);
  print_links(ranks, probe.links);
  print_collectives(std::move(sums));
  const std::vector<TensorGroup> groups = tensor_groups(topology, costs);
  if (!costs.empty()) print_tensor_groups(groups);
  print_findings(
      all_findings(ranks, probe, findings_of_sums(options, topology, hosts, devices), groups));
  if (options.output.empty()) return;
  write_cluster(options.output, cluster_of(ranks, topology, probe, groups));
  fmt::print("\n{}: links for 'sluice schedule --cluster {}'\n", options.output, options.output);
}

constexpr const char* kStarted = "SLUICE_SELF_TEST";

std::string lines_of(Pipeline& pipeline) {
  std::string lines;
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    if (!owned.owner) continue;
    const Tensor& value = owned.parameter->value;
    std::vector<std::byte> bytes(value.spec.bytes());
    copy_now(pipeline.compute().device(), bytes.data(), value.data, bytes.size());
    lines += fmt::format("{} {}\n", owned.parameter->name, sha256_hex(bytes));
  }
  return lines;
}

// Of all parameters, as `sluice digest` prints it; the same on all ranks.
std::string digest_after_a_step(Communicator& world, const std::vector<DeviceChoice>& devices,
                                int layers) {
  const TransformerConfig model{.layers = layers, .heads = 2, .width = 32, .context = 16};
  PipelineOptions options;
  options.shape.micro_batches = 4;
  options.devices.choices = devices;
  const TensorSpec tokens_of_one = {DType::kI32, Shape{model.context}};
  const BatchSpec data = {.inputs = {tokens_of_one}, .targets = {tokens_of_one}};
  Pipeline pipeline(world, Transformer(model), data, options);
  // Tokens that depend on their place alone.
  std::vector<std::int32_t> tokens;
  for (int place = 0; place <= options.shape.micro_batches * model.context; ++place) {
    tokens.push_back((place * place + place) % model.vocabulary);
  }
  const TensorSpec spec = {DType::kI32, Shape{options.shape.micro_batches, model.context}};
  pipeline.train_step({.inputs = {{tokens.data(), spec}}, .targets = {{tokens.data() + 1, spec}}});
  SilenceLimit silence(world.rank(), kSilenceSeconds, "the other ranks");
  Collectives collectives(world, kBaseTag, &silence);
  std::vector<ParameterDigest> digests;
  for (const std::string& lines : collectives.all_gather_strings(lines_of(pipeline))) {
    std::istringstream words(lines);
    for (ParameterDigest each; words >> each.name >> each.sha256;) digests.push_back(each);
  }
  std::ranges::sort(digests, {}, &ParameterDigest::name);
  pipeline.close();
  return digest_all(digests);
}

// Collective over at least 2 ranks, else Error(kUsage). Each rank trains one step of a small model
// alone. Then all ranks train the same step as one pipeline. Every digest of the parameters must be
// the same. Rank 0 prints it, in the form of `sluice digest`. Else Error(kMismatch) names what
// differs. `devices` as of PipelineOptions; ranks on different kinds of devices do differ.
void run_self_test(Communicator& world, const std::vector<DeviceChoice>& devices) {
  if (world.size() < 2) {
    throw Error(ErrorCode::kUsage,
                "--self-test compares one rank with several, and this job has one: start 'mpirun "
                "-n 2 sluice doctor --self-test', or the same without mpirun");
  }
  const int layers = std::max(4, world.size());
  const DeviceChoice mine = devices[at(world.rank()) % devices.size()];
  const std::string alone = digest_after_a_step(*world.split(world.rank(), 0), {mine}, layers);
  SilenceLimit silence(world.rank(), kSilenceSeconds, "the other ranks");
  Collectives collectives(world, kBaseTag, &silence);
  const std::vector<std::string> all = collectives.all_gather_strings(alone);
  const std::vector<std::string> hosts = collectives.all_gather_strings(mpi_info().host);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw_error(ErrorCode::kMismatch,
                "self-test: rank 0 on {} and rank {} on {} compute other bits, each alone ({} and "
                "{}): use one kind of processor, device and library on all hosts; 'sluice doctor' "
                "lists them",
                hosts[0], rank, hosts[rank], all[0], all[rank]);
  }
  const std::string together = digest_after_a_step(world, devices, layers);
  if (together != alone) {
    throw_error(ErrorCode::kMismatch,
                "self-test: a step over {} ranks gives the digest {}, one rank alone {}: this "
                "installation computes wrong values",
                world.size(), together, alone);
  }
  if (world.rank() != 0) return;
  fmt::print("self-test  a step over {} ranks has the digest it must have, that of one rank:\n{}\n",
             world.size(), together);
}

// For a process started alone: becomes `mpirun -n 2` of this program with `arguments` after its
// name, on this host, and does not return. Returns where this process comes from such a start, but
// its launcher gave it no rank. Throws Error(kMpi) where mpirun cannot be started.
void become_two_ranks(const std::vector<std::string>& arguments) {
  if (std::getenv(kStarted) != nullptr) return;
  // Root, more ranks than cores, and no network, for Open MPI 4.1 and 5.
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, const char*>>{
           {kStarted, "1"},
           {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
           {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
           {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
           {"PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"},
           {"OMPI_MCA_btl", "^tcp"}}) {
    ::setenv(name, value, /*overwrite=*/0);
  }
  std::vector<std::string> words = {
      "mpirun", "-n", "2", std::filesystem::read_symlink("/proc/self/exe").string(), "doctor"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execvp(pointers[0], pointers.data());
  throw_error(ErrorCode::kMpi,
              "--self-test cannot start 'mpirun' ({}): install it or put it on the PATH",
              std::strerror(errno));
}

}  // namespace

int doctor_command(const std::vector<std::string>& arguments) {
  DoctorOptions options;
  OptionTable table = make_table(options);
  const auto alone_with = [&](const char* option) {
    return launched_rank() < 0 && std::ranges::any_of(arguments, [&](const std::string& word) {
             return word.starts_with(option);
           });
  };
  if (alone_with("--hosts")) {
    return run_guarded(table, arguments, [&] {
      check_hosts({options.hosts, options.ssh, options.data, options.save});
    });
  }
  if (alone_with("--live")) {
    return run_guarded(table, arguments,
                       [&] { fmt::print("{}", live_status(options.live, wall_seconds())); });
  }
  if (alone_with("--self")) {
    const int code = run_guarded(table, arguments, [&] {
      if (options.self_test) become_two_ranks(arguments);
    });
    if (code != 0 || table.help_wanted()) return code;
  }
  return run_command(
      "doctor",
      [&] {
        table.parse(arguments);
        for (const char* name : {"hosts", "live"}) {
          if (!table.given(name)) continue;
          throw_usage("--{} is for 'sluice doctor' started without mpirun", name);
        }
        return table.help_wanted() ? table.help() : "";
      },
      [&](Communicator& world) {
        if (options.self_test) {
          run_self_test(world, options.devices);
        } else {
          examine(options, world);
        }
        require_stdout();
      });
}

}  // namespace sluice
