// Ranks that are processes on one emulated GPU: how many GPUs the job has, and what joins them.
#include <gmock/gmock.h>

#include <cstdlib>
#include <string>
#include <vector>

#include <sluice/options.hpp>

#include "comm/base/host.hpp"
#include "runtime/layout/device_choice.hpp"
#include "runtime/layout/edge_route.hpp"
#include "tests/comm/mpi/mpi_main.hpp"
#include "tests/gpus/gpus_of_job.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;

// What NCCL is told of the machine of this rank; restored at the end.
class HostId {
 public:
  explicit HostId(const std::string& id) {
    if (id.empty()) {
      ::unsetenv("NCCL_HOSTID");
    } else {
      ::setenv("NCCL_HOSTID", id.c_str(), 1);
    }
  }
  ~HostId() { ::unsetenv("NCCL_HOSTID"); }
  HostId(const HostId&) = delete;
  HostId& operator=(const HostId&) = delete;
};

// The route between the job's two ranks, which both compute on cuda:0.
EdgeRoute route_of(TransportChoice wanted) {
  const auto comm = testing::world().duplicate();
  Collectives world(*comm, 0, nullptr);
  RouteQuestion question;
  question.wanted = wanted;
  question.devices = choose_devices(world, make_topology(2, {2, 1, 1}, RankOrder::kPipelineFirst),
                                    parse_devices("cuda:0"), world.all_gather_strings(host_name()));
  question.nccl_refusal = find_why_no_nccl(world, question.devices, wanted);
  return RouteChoice(question).between(0, 1);
}

TEST(DeviceChoiceMpiTest, OneGpuOfOneMachineIsOneAndIsNotJoinedByNccl) {
  const HostId none("");
  const auto comm = testing::world().duplicate();
  EXPECT_EQ(gpus_of_job(*comm), 1);
  const EdgeRoute route = route_of(TransportChoice::kAuto);
  EXPECT_EQ(route.kind, RouteKind::kStaged);
  EXPECT_THAT(route.reason, HasSubstr("ranks 0 and 1 share cuda:0"));
}

TEST(DeviceChoiceMpiTest, OneGpuOfTwoMachinesAsNcclSeesThemIsTwoAndIsJoinedByNccl) {
  const HostId own("machine-" + std::to_string(testing::world().rank()));
  const auto comm = testing::world().duplicate();
  EXPECT_EQ(gpus_of_job(*comm), 2);
  EXPECT_EQ(route_of(TransportChoice::kAuto).kind, RouteKind::kNccl);
  EXPECT_EQ(route_of(TransportChoice::kNccl).kind, RouteKind::kNccl);
}

TEST(DeviceChoiceMpiTest, EqualHostIdsAreOneMachine) {
  const HostId same("machine");
  EXPECT_EQ(route_of(TransportChoice::kAuto).kind, RouteKind::kStaged);
}

TEST(DeviceChoiceMpiTest, TheMemoryOfTheGpuIsSharedWhateverNcclIsTold) {
  const HostId own("machine-" + std::to_string(testing::world().rank()));
  const auto comm = testing::world().duplicate();
  Collectives world(*comm, 0, nullptr);
  const auto devices = choose_devices(world, make_topology(2, {2, 1, 1}, RankOrder::kPipelineFirst),
                                      parse_devices("cuda:0"), {"a", "b"});
  EXPECT_EQ(devices[0].machine, devices[1].machine);
  EXPECT_NE(devices[0].nccl_machine, devices[1].nccl_machine);
}

}  // namespace
}  // namespace sluice
