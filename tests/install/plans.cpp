// A program that plans and draws: it links neither MPI nor CUDA. Ends with 0 if all of it worked.
#include <cstdio>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

int main() {
  const sluice::Schedule schedule = sluice::generate("1f1b", {.ranks = 2, .micro_batches = 4});
  std::printf("%s", sluice::draw_grid(schedule).c_str());
  return sluice::check(schedule) ? 1 : 0;
}
