// World: the ranks that train together. run_main() passes one; make_world() of <sluice/mpi.hpp>
// makes one from an MPI communicator.
#pragma once

#include <memory>

#pragma GCC visibility push(default)
namespace sluice {

// Which ranks are neighbours: those of one pipeline, or the replicas of one stage. kAuto: whichever
// loads the busiest host's network less; neighbours then share a host where they can, in whatever
// order the launcher numbered them.
enum class RankOrder { kAuto, kPipelineFirst, kReplicaFirst };

// Threading: all calls of one world, and of the pipelines over it, come from one thread. Only
// split() and the destructor block.
class World {
 public:
  virtual ~World() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  // Collective. Ranks with equal colour form a world, ordered by key, then by rank here.
  [[nodiscard]] std::unique_ptr<World> split(int colour, int key);

 private:
  friend class Communicator;  // comm/group/communicator.hpp
  World() = default;
};

}  // namespace sluice
#pragma GCC visibility pop
