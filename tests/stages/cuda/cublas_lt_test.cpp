// What needs no GPU: opening cuBLASLt.
#include "stages/cuda_context/cublas_lt.hpp"

#include <gmock/gmock.h>

#include <sluice/error.hpp>

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

TEST(CublasLtTest, NamesAMissingLibraryInOneLine) {
  EXPECT_THAT(
      [] { const cuda::CublasLt none("libcublasLt-missing.so.1"); },
      ThrowsMessage<Error>(AllOf(HasSubstr("cuBLASLt is missing: libcublasLt-missing.so.1: "),
                                 HasSubstr("install libcublas"), Not(HasSubstr("\n")))));
}

TEST(CublasLtTest, NamesAFileThatIsNoCublasLt) {
  EXPECT_THAT([] { const cuda::CublasLt other("libc.so.6"); },
              ThrowsMessage<Error>(
                  HasSubstr("cuBLASLt in libc.so.6 cannot be used: it has no cublasLtCreate")));
}

TEST(CublasLtTest, OpensWhatTheBuildFound) { EXPECT_GE(cuda::cublas_lt().GetVersion(), 120000U); }

}  // namespace
}  // namespace sluice
