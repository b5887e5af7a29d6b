#include "comm/group/clock_offset.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sluice {
namespace {

constexpr int kMostRoundTrips = 64;
constexpr int kLeastRoundTrips = 8;
constexpr double kEnoughSeconds = 0.005;  // after this, only the least

// From rank 0: what it knows so far, and whether it asks again.
struct Question {
  ClockOffset best;
  bool again = true;
};

// On rank 0.
void measure(Collectives& ranks, int peer, const ClockReader& clock) {
  Question question;
  question.best.error = std::numeric_limits<double>::infinity();
  double began = 0;
  for (int i = 0; question.again; ++i) {
    const double asked = clock();
    ranks.send(peer, object_bytes(question));
    double theirs = 0;
    ranks.recv(peer, object_bytes(theirs));
    const double answered = clock();
    if (i == 0) began = answered;  // the first waits until the peer is here
    const double error = (answered - asked) / 2;
    if (error < question.best.error) {
      question.best = {.at = theirs, .offset = theirs - (asked + error), .error = error};
    }
    const int done = i + 1;
    question.again =
        done < kLeastRoundTrips || (done < kMostRoundTrips && answered - began < kEnoughSeconds);
  }
  ranks.send(peer, object_bytes(question));
}

// On the others.
ClockOffset answer(Collectives& ranks, const ClockReader& clock) {
  for (;;) {
    Question question;
    ranks.recv(0, object_bytes(question));
    if (!question.again) return question.best;
    const double now = clock();
    ranks.send(0, object_bytes(now));
  }
}

}  // namespace

ClockOffset measure_clock_offset(Collectives& ranks, const ClockReader& clock) {
  const int size = ranks.communicator().size();
  if (ranks.communicator().rank() == 0) {
    for (int peer = 1; peer < size; ++peer) measure(ranks, peer, clock);
    return {.at = clock()};
  }
  ClockOffset mine = answer(ranks, clock);
  const double distance = std::abs(mine.offset);
  if (distance <= mine.error) return {.at = mine.at, .offset = 0, .error = mine.error + distance};
  return mine;
}

double on_first_rank(const ClockOffset& first, const ClockOffset& last, double time) {
  const double span = last.at - first.at;
  const double share = span > 0 ? std::clamp((time - first.at) / span, 0.0, 1.0) : 0.0;
  return time - (first.offset + share * (last.offset - first.offset));
}

}  // namespace sluice
