// Each context computes in a team of its own size, whatever other contexts and the program set.
#include "stages/compute/thread_team.hpp"

#include <gtest/gtest.h>
#include <pthread.h>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

#include "tests/stages/operators/operator_tools.hpp"

namespace sluice {
namespace {

// Of 16 x 4096 x 16, whose bits depend on the team.
Values matmul_in(ComputeContext& ctx) {
  const Operand x = random_operand(DType::kF32, {16, 4096}, 1),
                weight = random_operand(DType::kF32, {16, 4096}, 2), y(DType::kF32, {16, 16});
  linear_forward(ctx, x.tensor, weight.tensor, {}, y.tensor);
  return y.values();
}

TEST(ThreadTeamTest, AnotherContextChangesNoBits) {
  ComputeContext two(Device{}, 2);
  const Values before = matmul_in(two);
  ComputeContext one(Device{}, 1);
  EXPECT_EQ(matmul_in(two), before);
  ComputeContext alike(Device{}, 1);
  EXPECT_EQ(matmul_in(one), matmul_in(alike));
}

TEST(ThreadTeamTest, TheProgramKeepsItsTeam) {
  const int had = omp_get_max_threads();
  omp_set_num_threads(3);
  ComputeContext two(Device{}, 2);
  EXPECT_EQ(omp_get_max_threads(), 3);
  (void)matmul_in(two);
  EXPECT_EQ(omp_get_max_threads(), 3);
  {
    const ThreadTeam team(two);
    EXPECT_EQ(omp_get_max_threads(), 2);
  }
  EXPECT_EQ(omp_get_max_threads(), 3);
  omp_set_num_threads(had);
}

TEST(ThreadTeamTest, MoreThreadsThanALimitAllowsAreRefused) {
  const auto refused = [](int threads, ErrorCode code, const std::string& text) {
    try {
      const ComputeContext none(Device{}, threads);
      ADD_FAILURE() << threads << " threads";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused(0, ErrorCode::kUsage, "0 compute threads; legal are 1 to 1024");
  refused(2147483647, ErrorCode::kUsage, "2147483647 compute threads; legal are 1 to 1024");
  // Stacks as large as the address space.
  pthread_attr_t usual, large;
  ASSERT_EQ(pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(pthread_getattr_default_np(&large), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&large, std::size_t{1} << 47), 0);
  ASSERT_EQ(pthread_setattr_default_np(&large), 0);
  refused(8, ErrorCode::kDevice,
          "cannot start a thread (2 of 8 that compute): Resource temporarily unavailable; its "
          "limits are ulimit -u");
  ASSERT_EQ(pthread_setattr_default_np(&usual), 0);
  const ComputeContext some(Device{}, 8);
}

}  // namespace
}  // namespace sluice
