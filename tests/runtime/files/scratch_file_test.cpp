#include "runtime/files/scratch_file.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <new>
#include <span>
#include <string>

#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

constexpr std::size_t kPage = ScratchFile::kAlignment;

// Aligned memory with a number in each byte.
struct Pages {
  explicit Pages(std::size_t count, int number = 0)
      : bytes(count * kPage), data(new (std::align_val_t{kPage}) std::byte[bytes]) {
    std::fill(data, data + bytes, static_cast<std::byte>(number));
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { operator delete[](data, std::align_val_t{kPage}); }
  [[nodiscard]] std::span<std::byte> all() const { return {data, bytes}; }

  std::size_t bytes;
  std::byte* data;
};

// Opens the file without a name that lies in the directory once more.
int open_again(const std::filesystem::path& directory) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with(directory.string() + "/")) {
      return ::open(entry.path().c_str(), O_RDWR | O_CLOEXEC);
    }
  }
  return -1;
}

class ScratchFileTest : public ::testing::TestWithParam<bool> {
 protected:
  TemporaryDirectory directory_;
  std::filesystem::path below_ = directory_.path() / "made" / "here";
};

TEST_P(ScratchFileTest, ReadsWhatItWroteAndLeavesNothing) {
  ScratchFile file(below_, GetParam(), 5000 * kPage);
  // More than a piece, at two places.
  const Pages one(1500, 1), two(1100, 2), read(1500);
  file.write(0, one.all());
  file.write(1500 * kPage, two.all());
  file.read(0, read.all());
  EXPECT_TRUE(std::equal(read.all().begin(), read.all().end(), one.all().begin()));
  file.read(1500 * kPage, read.all().first(two.bytes));
  EXPECT_TRUE(std::equal(two.all().begin(), two.all().end(), read.all().begin()));
  EXPECT_TRUE(std::filesystem::is_empty(below_));
}

TEST_P(ScratchFileTest, NamesADiskThatGivesOtherBytesOrNone) {
  ScratchFile file(below_, GetParam(), 3 * kPage);
  const Pages page(3, 7);
  file.write(0, page.all());
  const int fd = open_again(below_);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::pwrite(fd, "x", 1, kPage + 5), 1);
  ::fsync(fd);
  expect_error(ErrorCode::kIo,
               {below_.string(), "12288 bytes at 0 are not those that were written"},
               [&] { file.read(0, page.all()); });
  ASSERT_EQ(::ftruncate(fd, kPage), 0);
  expect_error(ErrorCode::kIo, {below_.string(), "cannot read 12288 bytes at 0", "error"},
               [&] { file.read(0, page.all()); });
  ::close(fd);
}

TEST_P(ScratchFileTest, TakesItsRoomWhenItIsMade) {
  expect_error(ErrorCode::kIo, {below_.string(), "cannot take 1073741824.0 MiB"},
               [&] { ScratchFile(below_, GetParam(), std::size_t{1} << 50); });
  expect_error(ErrorCode::kIo, {"cannot make the directory"},
               [&] { ScratchFile(directory_.write("file", "") / "in", GetParam(), kPage); });
  EXPECT_TRUE(std::filesystem::is_empty(below_));
}

INSTANTIATE_TEST_SUITE_P(PastAndThroughThePageCache, ScratchFileTest, ::testing::Bool());

}  // namespace
}  // namespace sluice
