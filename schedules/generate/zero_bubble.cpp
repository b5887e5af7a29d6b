// Zero bubble, handcrafted (Qi et al., 2023, arXiv:2401.10241): the backward pass is split into I,
// which the previous stage waits for, and W, which no other stage needs. Stage s forwards
// k(p - 1 - s) micro-batches ahead, and W runs ks micro-batches after I.
//
// zb-h1, k = 1: holds min(p, m) micro-batches at most, as 1F1B does. Where F = I = W, the makespan
// is 3m + p - 1 from m = p on and 2(m + p - 1) + 1 below. p = 3, m = 5:
//
//   rank 0 | F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
//   rank 1 |    F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
//   rank 2 |       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
//
// zb-h2, k = 2: from m = 2p - 1 on each rank's own span is 3m, without a bubble, and ranks hold
// 2p - 1 micro-batches at most. A step that ends with a barrier gains nothing over zb-h1 from
// that: the last rank still starts p - 1 forwards late. p = 3, m = 5:
//
//   rank 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
//   rank 1 |    F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
//   rank 2 |       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
#include "schedules/generate/alternate.hpp"
#include "schedules/generate/generators.hpp"

namespace sluice::generators {

Schedule zb_h1(const ScheduleShape& shape) { return alternating("zb-h1", shape, 1, true); }

Schedule zb_h2(const ScheduleShape& shape) { return alternating("zb-h2", shape, 2, true); }

}  // namespace sluice::generators
