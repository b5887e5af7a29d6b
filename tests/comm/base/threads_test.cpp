#include "comm/base/threads.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

namespace sluice {
namespace {

// No system has room for a stack of this size.
class EndlessStacks {
 public:
  EndlessStacks() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t endless;
    pthread_attr_init(&endless);
    pthread_attr_setstacksize(&endless, std::size_t{1} << 47);
    pthread_setattr_default_np(&endless);
    pthread_attr_destroy(&endless);
  }
  ~EndlessStacks() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  EndlessStacks(const EndlessStacks&) = delete;
  EndlessStacks& operator=(const EndlessStacks&) = delete;

 private:
  pthread_attr_t before_;
};

TEST(ThreadsTest, AThreadThatCannotStartIsNamed) {
  const EndlessStacks none;
  try {
    start_thread("watchdog", [] {}).join();
    FAIL() << "it started";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("cannot start a thread (watchdog): Resource "
                                                   "temporarily unavailable; its limits are "));
  }
}

}  // namespace
}  // namespace sluice
