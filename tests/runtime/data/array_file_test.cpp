// Files of arrays: what NumPy and MNIST's files hold, and files that are not what they say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <zlib.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

using testing::ElementsAre;
using namespace std::string_literals;

template <typename T>
std::vector<T> values(const HostTensor& tensor) {
  EXPECT_EQ(tensor.spec.dtype, dtype_of<T>());
  std::vector<T> all(tensor.bytes.size() / sizeof(T));
  if (!all.empty()) std::memcpy(all.data(), tensor.bytes.data(), tensor.bytes.size());
  return all;
}

std::string gzip(const TemporaryDirectory& directory, const std::string& bytes) {
  const std::filesystem::path path = directory.path() / "packed";
  gzFile file = gzopen(path.c_str(), "wb");
  gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
  gzclose(file);
  return directory.read("packed");
}

// As numpy.save() writes it: the header is padded to a multiple of 64 bytes.
std::string npy(const std::string& dictionary, const std::string& bytes) {
  std::string header = dictionary;
  while ((10 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  const auto length = static_cast<std::uint16_t>(header.size());
  std::string file = "\x93NUMPY\x01\x00"s;
  file.append(reinterpret_cast<const char*>(&length), sizeof(length));
  return file + header + bytes;
}

template <typename T>
std::string raw(const std::vector<T>& all) {
  return {reinterpret_cast<const char*>(all.data()), all.size() * sizeof(T)};
}

TEST(IdxFileTest, HoldsAnArrayPlainOrCompressed) {
  const TemporaryDirectory directory;
  const std::string images = "\0\0\x08\x03\0\0\0\x02\0\0\0\x01\0\0\0\x03"s + "abcdef";
  for (const std::string& bytes : {images, gzip(directory, images)}) {
    const HostTensor read = read_idx(directory.write("images", bytes));
    EXPECT_EQ(read.spec.shape, (Shape{2, 1, 3}));
    EXPECT_THAT(values<std::uint8_t>(read), ElementsAre('a', 'b', 'c', 'd', 'e', 'f'));
  }
  const auto of_type = [&](char type, const std::string& bytes, char count) {
    return read_idx(directory.write("typed", "\0\0"s + type + "\x01\0\0\0"s + count + bytes));
  };
  EXPECT_THAT(values<std::int32_t>(of_type(0x09, "\xFF\x05", 2)), ElementsAre(-1, 5));
  EXPECT_THAT(values<std::int32_t>(of_type(0x0B, "\xFF\xFE\x01\x00"s, 2)), ElementsAre(-2, 256));
  EXPECT_THAT(values<std::int32_t>(of_type(0x0C, "\xFF\xFF\xFF\xFD", 1)), ElementsAre(-3));
  EXPECT_THAT(values<float>(of_type(0x0D, "\x3F\x80\0\0"s, 1)), ElementsAre(1));
  EXPECT_THAT(values<double>(of_type(0x0E, "\xC0\0\0\0\0\0\0\0"s, 1)), ElementsAre(-2));
  EXPECT_THAT(values<std::uint8_t>(of_type(0x08, "", 0)), ElementsAre());
}

TEST(NpyFileTest, HoldsWhatNumpySaves) {
  const TemporaryDirectory directory;
  const auto read = [&](const std::string& dictionary, const std::string& bytes) {
    return read_npy(directory.write("array.npy", npy(dictionary, bytes)));
  };
  const HostTensor floats =
      read("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }", raw<float>({1.5F, -2}));
  EXPECT_EQ(floats.spec.shape, (Shape{2, 1}));
  EXPECT_THAT(values<float>(floats), ElementsAre(1.5F, -2));
  const HostTensor row = read("{'descr': '<i8', 'fortran_order': True, 'shape': (3,), }",
                              raw<std::int64_t>({1, -1, 1LL << 40}));
  EXPECT_THAT(values<std::int64_t>(row), ElementsAre(1, -1, 1LL << 40));
  const HostTensor one = read("{\"shape\":(),'descr':'|u1','fortran_order':False}", "\x07");
  EXPECT_EQ(one.spec.shape, Shape{});
  EXPECT_THAT(values<std::uint8_t>(one), ElementsAre(7));
  EXPECT_EQ(read("{'descr': '<f2', 'fortran_order': False, 'shape': (0, 5), }", "").spec,
            (TensorSpec{DType::kF16, {0, 5}}));
  std::string third = "\x93NUMPY\x03\x00"s;
  const std::string dictionary = "{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}";
  const auto length = static_cast<std::uint32_t>(dictionary.size());
  third.append(reinterpret_cast<const char*>(&length), sizeof(length));
  third += dictionary + raw<double>({0.25});
  EXPECT_THAT(values<double>(read_npy(directory.write("third.npy", third))), ElementsAre(0.25));
}

TEST(ArrayFileTest, WhatIsNotWhatItSaysIsRefusedByName) {
  const TemporaryDirectory directory;
  const auto idx = [&](const std::string& bytes, const std::string& part) {
    SCOPED_TRACE(part);
    expect_error(ErrorCode::kData, {"IDX file '", "/bad'", part},
                 [&] { (void)read_idx(directory.write("bad", bytes)); });
  };
  const auto numpy = [&](const std::string& bytes, const std::string& part) {
    SCOPED_TRACE(part);
    expect_error(ErrorCode::kData, {".npy file '", "/bad'", part},
                 [&] { (void)read_npy(directory.write("bad", bytes)); });
  };
  idx("", "ends within its header: 0 of 4 bytes are there");
  idx("\0\0\x08\x02\0\0\0\x02\0"s, "ends within its header");
  idx("\x89PNG....", "begins with bytes 89 50 4e 47");
  idx("\0\0\x0A\x01\0\0\0\x01\0"s, "begins with bytes 00 00 0a 01");
  idx("\0\0\x08\x07"s, "has 7 dimensions; legal: 1 to 6");
  idx("\0\0\x08\x01\0\0\0\x04"s + "abc", "ends after 3 of the 4 bytes");
  idx("\0\0\x08\x01\0\0\0\x02"s + "abc", "goes on after the 2 bytes of values");
  idx("\0\0\x0E\x01\xFF\xFF\xFF\xFF"s, "has 8 bytes, but its header says 34359738360");
  idx("\0\0\x0E\x04\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF"s,
      "says more values than any memory holds");
  idx("\0\0\x0E\x04\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\0\0\0\0"s,
      "cannot be a tensor: a shape of more than 2^60 elements");
  std::string packed = gzip(directory, "\0\0\x08\x01\0\0\0\x40"s + std::string(64, 'x'));
  idx(packed.substr(0, packed.size() - 12), "is cut off within its compressed data");
  packed[packed.size() - 6] ^= 1;  // of the checksum
  idx(packed, "cannot be decompressed: incorrect data check");
  // Says 4 GB in a few bytes.
  idx(gzip(directory, "\0\0\x08\x01\xFF\xFF\xFF\xFF"s + std::string(64, 'x')), "ends after 64 of");

  numpy("\x93NUMPX\x01\0"s, "does not begin with \\x93NUMPY");
  numpy("\x93NUMPY\x04\0"s, "is of version 4; legal: 1 to 3");
  numpy("\x93NUMPY\x02\0\xFF\xFF\xFF\xFF"s, "has a header of 4294967295 bytes");
  const auto header = [&](const std::string& dictionary, const std::string& part) {
    numpy(npy(dictionary, ""), part);
  };
  header("", "no Python dictionary");
  header("{'descr': '<f4'", "no Python dictionary");
  header("{'descr': '<f4'} {", "no Python dictionary");
  header("{'descr: 1", "no Python dictionary");
  header("{'descr': '<f4', 'fortran_order': Maybe}", "no Python dictionary");
  header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", "no Python dictionary");
  header("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
         "no Python dictionary");
  header("{'descr': '<f4', 'shape': (1,)}", "lacks a key in its header");
  header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", "several fields");
  header("{'colour': 'red'}", "has the key 'colour'");
  header("{'descr': '>f4', 'fortran_order': False, 'shape': (1,)}", "type '>f4'; legal: <f2");
  header("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2)}", "is in Fortran's order");
  header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1)}",
         "has more dimensions than 6");
  header("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 2)}",
         "says more values than any memory holds");
  header("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", "ends after 0 of the 12 bytes");
}

TEST(ArrayFileTest, WhatCannotBeReadIsRefusedByName) {
  const TemporaryDirectory directory;
  expect_error(ErrorCode::kData, {"IDX file '/no/such/file' cannot be read: No such file"},
               [] { (void)read_idx("/no/such/file"); });
  expect_error(ErrorCode::kData, {"cannot be read"}, [&] { (void)read_npy(directory.path()); });
  const std::filesystem::path pipe = directory.path() / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  expect_error(ErrorCode::kData, {"cannot be read"}, [&] { (void)read_npy(pipe); });
}

HostTensor tensor_of(DType dtype, const std::string& bytes, std::int64_t count) {
  HostTensor made{.spec = {dtype, {count}}, .bytes = {}};
  const auto all = std::as_bytes(std::span(bytes));
  made.bytes.assign(all.begin(), all.end());
  return made;
}

TEST(ConvertedTest, ScalesAndRounds) {
  const HostTensor bytes = tensor_of(DType::kU8, "\x00\x80\xFF"s, 3);
  EXPECT_THAT(values<float>(converted(bytes, DType::kF32, 1.0 / 255, -0.5)),
              ElementsAre(-0.5F, static_cast<float>(128 / 255.0 - 0.5), 0.5F));
  EXPECT_THAT(values<std::int32_t>(converted(bytes, DType::kI32)), ElementsAre(0, 128, 255));
  const HostTensor reals = tensor_of(DType::kF64, raw<double>({-0.4, 254.6, 2.5}), 3);
  EXPECT_THAT(values<std::uint8_t>(converted(reals, DType::kU8)), ElementsAre(0, 255, 2));
  const HostTensor wide = tensor_of(DType::kI64, raw<std::int64_t>({(1LL << 60) + 1}), 1);
  EXPECT_THAT(values<std::int64_t>(converted(wide, DType::kI64)), ElementsAre((1LL << 60) + 1));
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF64, DType::kI64, DType::kF32}) {
    EXPECT_EQ(converted(converted(bytes, dtype), DType::kU8).bytes, bytes.bytes) << name_of(dtype);
  }
}

// Just beyond the middle between two numbers of the type; a float between would be the middle.
TEST(ConvertedTest, RoundsOnce) {
  const double small = std::ldexp(1.0, -40);
  const auto last = [](double value, DType to) {
    const HostTensor real = tensor_of(DType::kF64, raw<double>({value}), 1);
    return values<double>(converted(converted(real, to), DType::kF64)).back();
  };
  const auto check = [&](DType to, double step, double least) {
    for (const double sign : {1.0, -1.0}) {
      EXPECT_EQ(last(sign * (1 + step / 2 + small), to), sign * (1 + step)) << name_of(to);
      EXPECT_EQ(last(sign * (1 + step / 2 - small), to), sign) << name_of(to);
      EXPECT_EQ(last(sign * (1 + step / 2), to), sign) << name_of(to) << ": ties to even";
      EXPECT_EQ(last(sign * (1 + 3 * step / 2 - small), to), sign * (1 + step)) << name_of(to);
      EXPECT_EQ(last(sign * least * (0.5 + small), to), sign * least) << name_of(to);
      EXPECT_EQ(last(sign * least * (0.5 - small), to), 0) << name_of(to);
    }
  };
  check(DType::kBf16, std::ldexp(1.0, -7), std::ldexp(1.0, -133));
  check(DType::kF16, std::ldexp(1.0, -10), std::ldexp(1.0, -24));
  EXPECT_EQ(last(65519.999999, DType::kF16), 65504);
  EXPECT_EQ(last(1e300, DType::kBf16), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(last(std::numeric_limits<double>::quiet_NaN(), DType::kF16)));
}

TEST(ConvertedTest, RefusesWhatDoesNotFit) {
  const auto refused = [](double value, DType to, const std::string& part) {
    const HostTensor from = tensor_of(DType::kF64, raw<double>({0, value}), 2);
    expect_error(ErrorCode::kUsage, {part}, [&] { (void)converted(from, to); });
  };
  refused(255.6, DType::kU8, "value 255.6 at index 1 does not fit the type u8");
  refused(-1, DType::kU8, "does not fit the type u8");
  refused(2147483648.0, DType::kI32, "does not fit the type i32");
  refused(9223372036854775808.0, DType::kI64, "does not fit the type i64");
  refused(std::numeric_limits<double>::quiet_NaN(), DType::kI64, "value nan at index 1");
  HostTensor cut = tensor_of(DType::kF32, "abcd", 1);
  cut.bytes.pop_back();
  expect_error(ErrorCode::kUsage, {"tensor f32 [1] has 3 bytes; legal: 4"},
               [&] { (void)converted(cut, DType::kF64); });
}

}  // namespace
}  // namespace sluice
