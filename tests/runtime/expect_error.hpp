// Runs `body` and expects a sluice::Error whose code is `code` and whose message has every part.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include <sluice/error.hpp>

namespace sluice {

template <typename Body>
void expect_error(ErrorCode code, std::initializer_list<std::string> parts, Body&& body) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(name_of(error.code()), name_of(code)) << error.what();
    for (const std::string& part : parts) EXPECT_THAT(error.what(), ::testing::HasSubstr(part));
  }
}

}  // namespace sluice
