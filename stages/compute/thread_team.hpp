// The size of the calling thread's OpenMP team, while a context computes on it. Internal to Sluice.
//
// oneDNN reads the size at each call, and its bits depend on it. The program and other contexts of
// the thread have sizes of their own.
#pragma once

#include <omp.h>

#include <sluice/compute.hpp>

namespace sluice {

// The size is the context's for the life of this, and then what it was. Destroy it on the thread
// that made it.
class ThreadTeam {
 public:
  explicit ThreadTeam(const ComputeContext& ctx) : before_(omp_get_max_threads()) {
    omp_set_num_threads(ctx.threads());
  }
  ~ThreadTeam() { omp_set_num_threads(before_); }
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

 private:
  int before_;
};

}  // namespace sluice
