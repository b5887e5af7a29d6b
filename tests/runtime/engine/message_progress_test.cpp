// Messages that advance while operators run.
#include "runtime/engine/message_progress.hpp"

#include <gtest/gtest.h>

#include <array>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

namespace sluice {
namespace {

// Counts calls; throws at one of them.
class CountingTransport final : public Transport {
 public:
  Ticket start_send(int, int, const MessageBuffer&) override { return kDoneTicket; }
  Ticket post_recv(int, int, const MessageBuffer&, const MessageHeader&) override {
    return kDoneTicket;
  }
  void progress() override {
    if (++calls == throws_at) throw Error(ErrorCode::kPeer, "the peer is gone");
  }
  bool test(Ticket) override { return true; }
  void cancel_all() override {}

  int calls = 0, throws_at = 0;
};

class MessageProgressTest : public ::testing::Test {
 protected:
  // One operator on two numbers.
  void compute() {
    const Tensor x{values_.data(), {DType::kF32, Shape{1, 2}}};
    const Tensor y{results_.data(), {DType::kF32, Shape{1, 2}}};
    const Tensor weight{weight_.data(), {DType::kF32, Shape{2, 2}}};
    linear_forward(context_, x, weight, {}, y);
  }
  // Operators until the transport has been called `calls` times: calls have a distance in time.
  void compute_until(int calls) {
    while (transport_.calls < calls) compute();
  }

  ComputeContext context_{Device{}, 1};
  CountingTransport transport_;
  MessageProgress messages_{context_, transport_, nullptr, nullptr};
  std::array<float, 2> values_ = {1, 2}, results_ = {};
  std::array<float, 4> weight_ = {1, 0, 0, 1};
};

TEST_F(MessageProgressTest, OperatorsAdvanceMessagesWithinTheScopeAlone) {
  compute();
  EXPECT_EQ(transport_.calls, 0);
  {
    const MessageProgress::Scope scope(messages_);
    compute_until(3);
    messages_.rethrow();
  }
  const int calls = transport_.calls;
  compute();
  EXPECT_EQ(transport_.calls, calls);
  EXPECT_EQ(results_, values_);
}

TEST_F(MessageProgressTest, AnErrorWaitsForItsPlaceAndEndsTheCalls) {
  transport_.throws_at = 2;
  const MessageProgress::Scope scope(messages_);
  compute_until(2);  // operators do not throw it
  for (int more = 0; more < 100; ++more) compute();
  EXPECT_EQ(transport_.calls, 2);
  EXPECT_THROW(messages_.rethrow(), Error);
  messages_.rethrow();  // once
}

}  // namespace
}  // namespace sluice
