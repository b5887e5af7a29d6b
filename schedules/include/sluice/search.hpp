// Search for a schedule: given times, links and memory, which schedule, how many chunks on which
// placement, and which layers on which stage?
//
// A heuristic. It tries linear, looped, V and zigzag placements with several numbers of chunks. On
// each it tries all generators, the zero-bubble paper's greedy insertion with its eight settings
// (Qi et al. 2023, arXiv:2401.10241, section 3.1) and a list scheduler with a grid of rules. Then
// borders between stages move by a layer and simulated annealing moves actions, while that helps.
// No action overlaps another one, as in a plan: times of overlapped pairs count for nothing. What
// stages recompute is simulated ahead of waits (RECOMPUTE), and with `offload` so are moves
// (OFFLOAD, FETCH): these rank and refuse complete candidates, which are built and improved as if
// there were none.
// The result is the best exact schedule that check() and verify() accept, and its ratio to a lower
// bound of all orders of the same stages on the same ranks.
//
// Pure, thread-safe and deterministic: no clock and no random seed take part, so a request has the
// same answer on every machine with IEEE doubles. Seconds for 16 ranks and 64 micro-batches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#pragma GCC visibility push(default)
namespace sluice {

enum class Objective : std::uint8_t {
  kMakespan,  // the step as the engine runs it, which ends with a barrier
  kSpan,      // the longest time of one rank from its first to its last action, as the papers count
};

// A search takes longer than in proportion to the chunks: 64 are seconds.
inline constexpr int kMaxSearchedChunks = 64;

struct SearchRequest {
  int ranks = 1;          // p >= 1
  int micro_batches = 1;  // m >= 1
  Objective objective = Objective::kMakespan;

  // What the model costs. `stages` and `bytes` are of its parts in order, all alike where there is
  // one entry; the rest is as for simulate().
  SimulationTimes model = {};
  // true: each part is a layer, and a stage is a run of whole layers, one at least. false: the
  // parts are the shares of the ranks, p of them, and can be cut anywhere; v chunks get a v-th
  // each.
  bool whole_layers = false;

  // Numbers of chunks to try, each at most kMaxSearchedChunks; empty: 1, 2, 4 and 8, as far as
  // there are layers, and what divides the whole layers per rank, up to 16.
  std::vector<int> chunks = {};
  // Stages can split their backward pass into I and W.
  bool split_backward = true;

  // What a rank may hold, one for all or one per rank; empty: anything. At most one of the two.
  std::vector<std::int64_t> byte_limit = {};  // as Simulation::peak_bytes; needs model.bytes
  // In micro-batches, counted as Simulation::peak_in_flight: a chunk counts one v-th, v the number
  // of the rank's stages.
  std::vector<double> in_flight_limit = {};

  // Each stage keeps half of what it has in flight, as half_resident() says; `byte_limit` counts
  // what stays. Moves take what `model` says in bytes and move_link.
  bool offload = false;

  // How many actions annealing plays in all, about 10 million per second; 0: none.
  std::int64_t effort = 20'000'000;
};

struct SearchCandidate {
  std::string origin;     // "zb-v", "greedy insertion (...)", ...
  std::string placement;  // "linear", "looped", "V", "zigzag"
  int chunks = 1;
  double makespan = 0, span = 0, bubble_span = 0;
  double peak_in_flight = 0;  // micro-batches, of the fullest rank
};

struct SearchResult {
  Schedule schedule;       // named "auto"; compute actions only
  SearchCandidate chosen;  // where it comes from
  // Stage s owns layers [first_layer[s], first_layer[s + 1]); empty where the model is cut
  // anywhere.
  std::vector<int> first_layer;
  SimulationTimes times;  // of its stages
  Simulation simulation;
  // Of the objective: a bound below every order of these stages on these ranks within the limits.
  // It counts the times of actions, that a rank runs one at a time, latency and transfer of
  // messages, and what a rank may hold unless it offloads; not that messages queue on a link.
  double lower_bound = 0;
  double ratio = 1;  // objective / lower_bound
  // The best of each origin, placement and number of chunks that fits, best first, each before
  // borders and actions were moved.
  std::vector<SearchCandidate> candidates;
  std::vector<std::string> left_out;  // why some placements had no candidate, a sentence each
};

// Throws Error(kUsage) for illegal requests, and where nothing fits the memory, with the
// least limit that would do.
[[nodiscard]] SearchResult search_schedule(const SearchRequest& request);

// The model's layers on the stages of a placement, as SearchResult::first_layer: whole layers, one
// entry of `layers` each, so that the largest stage is as small as it can be, and then the most
// loaded rank lighter while moving one border helps. Of fewer layers than stages each has its own
// stage, and stages before the last are empty, as in a training. Throws Error(kUsage) for no
// layers, for more than 10,000, and where entries of bytes are of another number.
[[nodiscard]] std::vector<int> cut_layers(const SimulationTimes& layers,
                                          const Placement& placement);
// What the stages of such a cut cost. Requires: `first_layer` ascends from 0 to
// the number of layers.
[[nodiscard]] SimulationTimes join_layers(const SimulationTimes& layers,
                                          const std::vector<int>& first_layer);

}  // namespace sluice
#pragma GCC visibility pop
