// A communicator of a test's own, which passes every call on to a duplicate of another: tests
// derive from it and change some calls.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "comm/group/communicator.hpp"

namespace sluice::testing {

class PassingCommunicator : public Communicator {
 public:
  explicit PassingCommunicator(Communicator& comm) : comm_(comm.duplicate()) {}
  int rank() const override { return comm_->rank(); }
  int size() const override { return comm_->size(); }
  int max_tag() const override { return comm_->max_tag(); }
  int local_size() const override { return comm_->local_size(); }
  const char* name() const override { return "passing"; }
  std::string device_memory_unsupported_reason(Device /*device*/) const override { return ""; }
  Request start_send(int peer, int tag, std::span<const std::byte> bytes) override {
    return comm_->start_send(peer, tag, bytes);
  }
  Request post_recv(int peer, int tag, std::span<std::byte> bytes) override {
    return comm_->post_recv(peer, tag, bytes);
  }
  bool test(Request& request, Arrival* arrival) override { return comm_->test(request, arrival); }
  void cancel(Request& request) override { comm_->cancel(request); }
  void keep(KeepAlive memory) override { comm_->keep(std::move(memory)); }
  std::unique_ptr<Communicator> split(int colour, int key) override {
    return comm_->split(colour, key);
  }
  std::unique_ptr<Communicator> duplicate() override { return comm_->duplicate(); }

 protected:
  [[nodiscard]] Communicator& inner() const { return *comm_; }

 private:
  std::unique_ptr<Communicator> comm_;
};

}  // namespace sluice::testing
