#include "runtime/report/layout_report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include <sluice/simulate.hpp>

#include "comm/base/cores.hpp"
#include "comm/base/joined.hpp"
#include "runtime/entry/network_facts.hpp"
#include "runtime/files/json_text.hpp"

namespace sluice {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankRow, host, device, replica, tensor, stages, cores,
                                   host_cores, threads, interfaces)

namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostShown = 64;

double mebi(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

std::string cores_text(const RankRow& rank) {
  if (rank.cores.empty()) return "not known";
  return fmt::format("{} of {}", to_cpu_list(rank.cores), rank.host_cores);
}

// "E 0-1": the embedding and blocks 0 and 1; "H": the head; "-" for a stage without layers.
std::string describe_layers(const Partition& partition, int stage) {
  const int layers = partition.first.back();
  const int first = partition.first[static_cast<std::size_t>(stage)];
  const int last = partition.first[static_cast<std::size_t>(stage) + 1];
  const int first_block = std::max(first, 1) - 1;
  const int last_block = std::min(last, layers - 1) - 2;
  std::string text;
  const auto append = [&](const std::string& part) { text += (text.empty() ? "" : " ") + part; };
  if (first == last) return "-";
  if (first == 0) append("E");
  if (first_block == last_block) append(std::to_string(first_block));
  if (first_block < last_block) append(fmt::format("{}-{}", first_block, last_block));
  if (last == layers) append("H");
  return text;
}

// The device of each rank; with a GPU among them, also the routes between stages and of sums.
std::string describe_connections(const JobLayout& layout) {
  std::string text = describe_devices(layout.place.devices);
  if (std::all_of(layout.place.devices.begin(), layout.place.devices.end(),
                  [](const RankDevice& rank) { return rank.device.kind == DeviceKind::kCpu; })) {
    return text;
  }
  text += layout.place.driver_note;
  text += describe_routes(layout.wires.routes);
  for (const TiedParameter& tie : layout.parameters.tied) {
    for (std::size_t use = 1; use < tie.uses.size(); ++use) {
      if (tie.routes[use].kind == RouteKind::kLocal) continue;
      text += fmt::format("  tied {}, stages {}-{}: {}\n", tie.name, tie.uses.front().stage,
                          tie.uses[use].stage, describe_route(tie.routes[use]));
    }
  }
  return text + describe_sums(layout.wires.sums, layout.wires.all_reduce) +
         describe_tensor(layout.wires.tensor);
}

// What the bits depend on, with the ranks of the job unless all compute alike.
std::string describe_arithmetic(const JobLayout& layout) {
  std::string text;
  for (const auto& [arithmetic, ranks] : layout.arithmetic) {
    const bool all = static_cast<int>(ranks.size()) == layout.place.topology.ranks();
    text += all ? fmt::format("  arithmetic: {}\n", arithmetic)
                : fmt::format("  arithmetic of ranks {}: {}\n", joined(ranks, ","), arithmetic);
  }
  return text;
}

// Notes of stages: each once, with the numbers of the stages unless all have it.
std::string describe_notes(const JobLayout& layout) {
  std::map<std::string, std::vector<int>> stages_by_note;
  for (int stage = 0; stage < layout.plans.num_stages(); ++stage) {
    const std::string& note = layout.parameters.stages[static_cast<std::size_t>(stage)].note;
    if (!note.empty()) stages_by_note[note].push_back(stage);
  }
  std::string text;
  for (const auto& [note, stages] : stages_by_note) {
    const bool all = stages.size() == layout.parameters.stages.size();
    const char* name = stages.size() == 1 ? "stage" : "stages";
    text += all ? fmt::format("  {}\n", note)
                : fmt::format("  {} {}, {}\n", name, joined(stages, ","), note);
  }
  return text;
}

// The memory and the disk that saving takes; empty without it.
std::string describe_saves(const JobLayout& layout) {
  std::size_t most = 0;
  for (const RankMemory& memory : layout.memory.ranks) most = std::max(most, memory.save_copy);
  if (most == 0) return "";
  return fmt::format(
      "  saving: each rank keeps a copy of its share in host memory, at most {:.1f} MiB; a save "
      "of f32 values and optimizer state takes {:.1f} MiB on disk\n",
      mebi(most), mebi(layout.memory.save_bytes));
}

// What leaves the devices between forward and backward; empty where nothing does.
std::string describe_offload(const JobLayout& layout) {
  if (layout.plans.resident.empty()) return "";
  std::string stages;
  std::size_t host = 0, disk = 0;
  for (int stage = 0; stage < layout.plans.num_stages(); ++stage) {
    const StepPlans::States states = StepPlans::states_of(layout.plans.train, stage);
    if (states.stored == 0) continue;
    stages += fmt::format("{}{} on the device and {} away in stage {}", stages.empty() ? "" : ", ",
                          states.slots, states.stored, stage);
  }
  if (stages.empty()) return "  offload: no micro-batch waits long enough to leave\n";
  for (const RankMemory& memory : layout.memory.ranks) {
    host = std::max(host, memory.offloaded_host);
    disk = std::max(disk, memory.offloaded_disk);
  }
  return fmt::format("  offload: activations of micro-batches at once: {}; at most {:.1f} MiB {}\n",
                     stages, mebi(disk > 0 ? disk : host),
                     disk > 0 ? "on the disk of each rank" : "of host memory on each rank");
}

// What of the optimizer's state is not in memory; empty where all is.
std::string describe_offloaded_state(const JobLayout& layout) {
  std::size_t most = 0, memory = 0;
  for (const RankMemory& each : layout.memory.ranks) {
    most = std::max(most, each.optimizer_disk);
    if (each.optimizer_disk > 0) memory = std::max(memory, each.optimizer);
  }
  if (most == 0) return "";
  return fmt::format(
      "  offload: the optimizer's state, at most {:.1f} MiB on the disk of each rank, which an "
      "update reads and writes through {:.1f} MiB of memory\n",
      mebi(most), mebi(memory));
}

// The memory of sums and collectives over ranks; empty without them.
std::string describe_collectives(const JobLayout& layout) {
  std::size_t most = 0;
  for (const RankMemory& memory : layout.memory.ranks) most = std::max(most, memory.collectives);
  if (most == 0) return "";
  return fmt::format(
      "  sums and collectives over ranks: at most {:.1f} MiB of host memory on each rank\n",
      mebi(most));
}

// The ranks that --cuda-graphs concerns; empty without the option.
std::string describe_graphs(const JobLayout& layout) {
  if (!layout.plans.cuda_graphs) return "";
  const auto gpus =
      std::count_if(layout.place.devices.begin(), layout.place.devices.end(),
                    [](const RankDevice& rank) { return rank.device.kind != DeviceKind::kCpu; });
  if (gpus == 0) return "  CUDA graphs: --cuda-graphs has no effect, no rank computes on a GPU\n";
  const auto ranks = static_cast<std::ptrdiff_t>(layout.place.devices.size());
  const std::string where =
      gpus < ranks ? fmt::format("on {} of a pipeline's {} ranks, ", gpus, ranks) : "";
  return fmt::format("  CUDA graphs: {}recorded after step 1, replayed from step 2 on\n", where);
}

// A sentence where stages have no layers; else empty.
std::string describe_empty_stages(const Partition& partition) {
  const auto empty = std::count_if(
      partition.first.begin() + 1, partition.first.end(),
      [before = 0](int first) mutable { return std::exchange(before, first) == first; });
  if (empty == 0) return "";
  return fmt::format(
      "  warning: {} of {} stages have no layers, the model has {}; each empty one passes its "
      "input "
      "on and takes time for its messages. Fewer chunks or ranks avoid it.\n",
      empty, partition.stages(), partition.first.back());
}

// " x 2 tensor ranks of 8 shards"; empty of one rank and one shard.
std::string describe_tensor_ranks(const RankPlace& place) {
  const int ranks = place.topology.size.tensor;
  if (ranks == 1 && place.shards == 1) return "";
  return fmt::format(" x {} tensor rank{}{}", ranks, ranks == 1 ? "" : "s",
                     place.shards == ranks ? "" : fmt::format(" of {} shards", place.shards));
}

// A line where groups of replicas have a copy of the parameters each; else empty.
std::string describe_copies(const ShardGroups& groups) {
  if (groups.copies == 1) return "";
  return fmt::format("  parameters: {} copies, each in shards of {} replicas\n", groups.copies,
                     groups.size());
}

// What the ranks that share a pipeline rank's stages exchange for a micro-batch of a training.
struct SharedCalls {
  std::size_t calls = 0;
  double bytes = 0;  // that each of the ranks passes
};

SharedCalls shared_calls(const JobLayout& layout, int pipeline_rank) {
  SharedCalls sum;
  for (const int stage : layout.plans.placement().stages_of(pipeline_rank)) {
    const StageCollectives& all =
        layout.parameters.stages[static_cast<std::size_t>(stage)].collectives;
    for (const auto* calls :
         {&all.forward, &all.loss, &all.backward_input, &all.backward_weight, &all.recompute}) {
      for (const PlannedCollective& call : *calls) {
        if (call.axis != CollectiveAxis::kTensor) continue;
        ++sum.calls;
        sum.bytes += static_cast<double>(call.bytes);
      }
    }
  }
  return sum;
}

// A warning where ranks that share stages are on several hosts; else empty.
std::string describe_spread_ranks(const JobLayout& layout) {
  const Topology& topology = layout.place.topology;
  if (topology.size.tensor == 1) return "";
  std::size_t spread = 0;
  std::string first;
  for (const std::vector<int>& group : topology.groups(Axis::kTensor)) {
    const std::vector<int> hosts = layout.place.hosts_of(group);
    const std::size_t different = std::set(hosts.begin(), hosts.end()).size();
    if (different == 1 || ++spread > 1) continue;
    const Place place = topology.place_of(group.front());
    const SharedCalls shared = shared_calls(layout, place.pipeline);
    first = fmt::format(
        "  warning: the tensor ranks of pipeline rank {}, replica {} (ranks {} of the job) are on "
        "{} hosts: each micro-batch makes {} calls of {:.2f} MiB in all over the link between "
        "them, and the layers wait for each",
        place.pipeline, place.replica, joined(group, ","), different, shared.calls,
        shared.bytes / (1 << 20));
  }
  if (spread == 0) return "";
  if (spread > 1) {
    first +=
        fmt::format("; {} other group{} spread as well", spread - 1, spread == 2 ? " is" : "s are");
  }
  return first + ". Fewer tensor ranks, with more pipeline ranks or replicas, avoid it.\n";
}

}  // namespace

std::string describe_shared_calls(const JobLayout& layout, const CollectiveCosts& costs) {
  const int tensors = layout.place.topology.size.tensor;
  if (tensors == 1) return "";
  const Placement& placement = layout.plans.placement();
  SimulationTimes times;
  for (const StageEntry& stage : layout.parameters.stages) {
    times.stages.push_back({0, 0, 0});
    times.collectives.push_back(stage.collectives);
  }
  times.collective_costs[static_cast<std::size_t>(CollectiveAxis::kTensor)] = costs;
  const Simulation simulation = simulate(layout.plans.order, times, {.timeline = false});
  int most = 0;
  std::vector<SharedCalls> calls;
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    calls.push_back(shared_calls(layout, rank));
    if (calls.back().bytes > calls[static_cast<std::size_t>(most)].bytes) most = rank;
  }
  const SharedCalls& of_rank = calls[static_cast<std::size_t>(most)];
  const int micro_batches = layout.plans.train.micro_batches;
  const double milliseconds = 1000 * simulation.busy[static_cast<std::size_t>(most)];
  return fmt::format(
      "  collectives of tensor ranks: {} calls of {:.1f} MiB in all in a step of pipeline rank "
      "{}{}\n",
      of_rank.calls * static_cast<std::size_t>(micro_batches),
      of_rank.bytes * micro_batches / (1 << 20), most,
      milliseconds > 0 ? fmt::format(", {:.1f} ms by the simulation with what these ranks measured",
                                     milliseconds)
                       : "");
}

std::string describe_layout(const JobLayout& layout, const Partition& partition) {
  const AxisSizes& size = layout.place.topology.size;
  const bool shared = size.tensor > 1;  // by tensor ranks
  const RankPlace& where = layout.place;
  const int micro_batches = layout.plans.train.micro_batches / where.shares;
  std::string text = fmt::format(
      "{} rank{}: pipeline of {} x {} {}{}{}{}, schedule {}, {} micro-batch{} per {} and step\n",
      where.topology.ranks(), where.topology.ranks() == 1 ? "" : "s", size.pipeline,
      where.virtual_replicas(), where.name_of_part(), where.virtual_replicas() == 1 ? "" : "s",
      where.shares > 1 ? fmt::format(" on {}", size.replica) : "", describe_tensor_ranks(where),
      layout.plans.train.schedule_name, micro_batches, micro_batches == 1 ? "" : "es",
      where.name_of_part());
  if (!layout.plans.train.exact) {
    text +=
        "  (not exact: weight gradients do not accumulate in ascending order, so the bits are this "
        "schedule's own)\n";
  }
  text += fmt::format(
      "  {:<13} {:<7} {:<16} {:>10} {:>10} {:>10} {:>11} {:>9} {:>9} {:>9} {:>9} {:>10} {:>9}\n",
      "pipeline rank", "stages", "layers", "parameters", "gradients", "optimizer", "activations",
      "workspace", "operators", "messages", "libraries", "total MiB", "outside");
  for (int row = 0; row < size.pipeline * size.tensor; ++row) {
    const Place place = {.pipeline = row / size.tensor, .tensor = row % size.tensor};
    std::string stages, owned;
    for (const int stage : layout.plans.placement().stages_of(place.pipeline)) {
      if (!stages.empty()) stages += ",", owned += " ";
      stages += std::to_string(stage);
      owned += describe_layers(partition, stage);
    }
    const RankMemory& memory = layout.memory.of(place);
    text += fmt::format(
        "  {:<13} {:<7} {:<16} {:>10.1f} {:>10.1f} {:>10.1f} {:>11.1f} {:>9.1f} {:>9.1f} {:>9.1f} "
        "{:>9.1f} {:>10.1f} {:>9.1f}\n",
        fmt::format("{}{}", place.pipeline, shared ? fmt::format(", tensor {}", place.tensor) : ""),
        stages, owned, mebi(memory.parameters), mebi(memory.gradients), mebi(memory.optimizer),
        mebi(memory.activations), mebi(memory.workspace), mebi(memory.operators),
        mebi(memory.buffers), mebi(memory.libraries), mebi(memory.total()),
        mebi(memory.outside_arena));
  }
  text += fmt::format(
      "  (layers: E embedding, H head, numbers are blocks, - none; outside: of the total, what\n"
      "  a rank allocates outside its arena; {})\n",
      layout.parameters.cut && layout.place.topology.size.replica > 1
          ? "optimizer: of the replica with the largest part"
          : "each replica holds the same");
  return text + describe_empty_stages(partition) + describe_spread_ranks(layout) +
         describe_copies(where.shard_groups) + describe_connections(layout) +
         describe_arithmetic(layout) + describe_notes(layout) + describe_offload(layout) +
         describe_offloaded_state(layout) + describe_saves(layout) + describe_collectives(layout) +
         describe_graphs(layout);
}

std::string rank_table(const std::vector<RankRow>& ranks, std::string_view indent) {
  const std::size_t shown = std::min(ranks.size(), kMostShown);
  const bool shared =
      std::any_of(ranks.begin(), ranks.end(), [](const RankRow& row) { return row.tensor >= 0; });
  std::vector<std::vector<std::string>> lines = {
      {"rank", "host", "device", "replica", "stages", "cores", "threads", "interface"}};
  if (shared) lines.front().insert(lines.front().begin() + 4, "tensor");
  for (std::size_t rank = 0; rank < shown; ++rank) {
    const RankRow& row = ranks[rank];
    lines.push_back({std::to_string(rank), row.host, row.device, std::to_string(row.replica),
                     joined(row.stages, ","), cores_text(row), std::to_string(row.threads),
                     row.interfaces.empty() ? "-" : joined(row.interfaces, ",")});
    if (shared) lines.back().insert(lines.back().begin() + 4, std::to_string(row.tensor));
  }
  std::vector<std::size_t> widths(lines.front().size());
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const auto& line : lines) {
    std::string row(indent);
    for (std::size_t i = 0; i < line.size(); ++i)
      row += fmt::format("{:<{}}", line[i], widths[i] + 2);
    row.erase(row.find_last_not_of(' ') + 1);
    text += row + '\n';
  }
  if (ranks.size() > shown) {
    text += fmt::format("{}and {} more ranks\n", indent, ranks.size() - shown);
  }
  return text + fmt::format(
                    "{}(cores: those the rank is bound to, of those the job may use on its "
                    "host; interface: of\n{}the rank's TCP connections over IPv4, - none)\n",
                    indent, indent);
}

std::string gather_rank_table(Collectives& world, const JobLayout& layout, int threads,
                              std::string_view indent) {
  const RankPlace& place = layout.place;
  const RankDevice& device = place.devices[static_cast<std::size_t>(place.here.pipeline)];
  NetworkFacts network = network_facts();
  network.connections = tcp_connections();
  const RankRow mine = {.host = device.host,
                        .device = to_string(device.device),
                        .replica = place.here.replica,
                        .stages = layout.plans.placement().stages_of(place.here.pipeline),
                        .cores = affinity_list(),
                        .host_cores = host_cores(),
                        .threads = threads,
                        .interfaces = interfaces_used(network),
                        .tensor = place.topology.size.tensor > 1 ? place.here.tensor : -1};
  std::vector<RankRow> rows;
  for (const std::string& text :
       world.all_gather_strings(dump_json(Json(mine), -1, InvalidUtf8::replace))) {
    rows.push_back(parse_json(text).get<RankRow>());
  }
  return rank_table(rows, indent);
}

}  // namespace sluice
