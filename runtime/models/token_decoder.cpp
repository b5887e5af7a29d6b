#include "runtime/models/token_decoder.hpp"

#include <array>
#include <optional>
#include <utility>
#include <vector>

namespace sluice {

class TokenDecoder::Step {
 public:
  explicit Step(std::unique_ptr<Step> next) : next_(std::move(next)) {}
  virtual ~Step() = default;
  // One token, or a piece of the one that an earlier step joins all to.
  virtual void add(std::string_view text) = 0;
  // A new text begins.
  virtual void finish() { next_->finish(); }

 protected:
  [[nodiscard]] Step& next() { return *next_; }

 private:
  std::unique_ptr<Step> next_;
};

namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Bytes of the letter that `lead` begins; 0: none does.
std::size_t length_of(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) return 3;
  return lead >= 0xF0 && lead <= 0xF4 ? 4 : 0;
}

// Whether `byte` may follow as the byte number `place`, from 1, of the letter that `lead` begins.
bool continues(unsigned char lead, std::size_t place, unsigned char byte) {
  unsigned char low = 0x80, high = 0xBF;
  if (place == 1) {
    if (lead == 0xE0) low = 0xA0;   // overlong
    if (lead == 0xED) high = 0x9F;  // surrogates
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;  // beyond U+10FFFF
  }
  return byte >= low && byte <= high;
}

using Step = TokenDecoder::Step;
using StepPointer = std::unique_ptr<Step>;
using Kind = DecodeStep::Kind;

// The letters of a text, in UTF-8; the text is valid.
std::vector<std::string_view> letters_of(std::string_view text) {
  std::vector<std::string_view> letters;
  for (std::size_t first = 0; first < text.size();) {
    std::size_t end = first + 1;
    while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) ++end;
    letters.push_back(text.substr(first, end - first));
    first = end;
  }
  return letters;
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (std::size_t place = 0; (place = text.find(from, place)) != std::string::npos;) {
    text.replace(place, from.size(), to);
    place += to.size();
  }
}

class Output final : public Step {
 public:
  explicit Output(std::string& out) : Step(nullptr), out_(out) {}
  void add(std::string_view text) override { out_ += text; }
  void finish() override {}

 private:
  std::string& out_;
};

// GPT-2's table: visible letters of Latin-1 stand for themselves, the other bytes for U+0100 on.
class ByteLevel final : public Step {
 public:
  explicit ByteLevel(StepPointer next) : Step(std::move(next)) {
    letter_bytes_.fill(-1);
    std::size_t other = 256;
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const bool visible = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
      letter_bytes_.at(visible ? byte : other++) = static_cast<int>(byte);
    }
  }
  void add(std::string_view text) override {
    std::string bytes;
    for (const std::string_view letter : letters_of(text)) {
      const std::optional<char> byte = byte_of(letter);
      if (!byte) {  // such as an added token: it stands for its own bytes
        bytes = text;
        break;
      }
      bytes += *byte;
    }
    next().add(pieces_.add(bytes));
  }
  void finish() override {
    next().add(pieces_.finish());
    next().finish();
  }

 private:
  [[nodiscard]] std::optional<char> byte_of(std::string_view letter) const {
    auto code = static_cast<std::size_t>(static_cast<unsigned char>(letter[0]));
    if (letter.size() == 2)
      code = (code & 0x1F) << 6 | (static_cast<unsigned char>(letter[1]) & 0x3F);
    if (letter.size() > 2 || code >= letter_bytes_.size() || letter_bytes_[code] < 0) return {};
    return static_cast<char>(letter_bytes_[code]);
  }

  std::array<int, 256 + 68> letter_bytes_ = {};
  Utf8Pieces pieces_;
};

class Replace final : public Step {
 public:
  Replace(const DecodeStep& step, StepPointer next)
      : Step(std::move(next)), from_(step.from), to_(step.to) {}
  void add(std::string_view text) override {
    std::string result(text);
    replace_all(result, from_, to_);
    next().add(result);
  }

 private:
  std::string from_, to_;
};

// Bytes in a row become one text, or a U+FFFD for each byte where they are no UTF-8.
class ByteFallback final : public Step {
 public:
  using Step::Step;
  void add(std::string_view text) override {
    if (const std::optional<char> byte = byte_of(text)) {
      run_ += *byte;
      return;
    }
    end_run();
    next().add(text);
  }
  void finish() override {
    end_run();
    next().finish();
  }

 private:
  static std::optional<char> byte_of(std::string_view text) {
    if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return {};
    int value = 0;
    for (const char digit : text.substr(3, 2)) {
      const int letter = digit | 0x20;
      if (digit >= '0' && digit <= '9') {
        value = value * 16 + (digit - '0');
      } else if (letter >= 'a' && letter <= 'f') {
        value = value * 16 + (letter - 'a' + 10);
      } else {
        return {};
      }
    }
    return static_cast<char>(value);
  }
  void end_run() {
    const std::string run = std::exchange(run_, {});
    if (run.empty()) return;
    if (is_utf8(run)) return next().add(run);
    for (std::size_t i = 0; i < run.size(); ++i) next().add(kReplacement);
  }

  std::string run_;
};

class Strip final : public Step {
 public:
  // `joined`: texts are pieces of one token.
  Strip(const DecodeStep& step, bool joined, StepPointer next)
      : Step(std::move(next)),
        letter_(step.from),
        most_(step.most),
        joined_(joined),
        left_(most_) {}
  void add(std::string_view text) override {
    if (!joined_) left_ = most_;
    while (left_ > 0 && text.starts_with(letter_)) {
      text.remove_prefix(letter_.size());
      --left_;
    }
    if (!text.empty()) left_ = 0;
    next().add(text);
  }
  void finish() override {
    left_ = most_;
    next().finish();
  }

 private:
  std::string letter_;
  int most_;
  bool joined_;
  int left_;
};

class Metaspace final : public Step {
 public:
  Metaspace(const DecodeStep& step, StepPointer next)
      : Step(std::move(next)), letter_(step.from), drops_(step.most == 1), first_(drops_) {}
  void add(std::string_view text) override {
    std::string result(text);
    replace_all(result, letter_, std::exchange(first_, false) ? "" : " ");
    next().add(result);
  }
  void finish() override {
    first_ = drops_;
    next().finish();
  }

 private:
  std::string letter_;
  bool drops_, first_;
};

StepPointer make_step(const DecodeStep& step, bool joined, StepPointer next) {
  switch (step.kind) {
    case Kind::kByteLevel:
      return std::make_unique<ByteLevel>(std::move(next));
    case Kind::kReplace:
      return std::make_unique<Replace>(step, std::move(next));
    case Kind::kByteFallback:
      return std::make_unique<ByteFallback>(std::move(next));
    case Kind::kStrip:
      return std::make_unique<Strip>(step, joined, std::move(next));
    case Kind::kMetaspace:
      return std::make_unique<Metaspace>(step, std::move(next));
    case Kind::kFuse:  // what it joins comes out piece by piece
      break;
  }
  return next;
}

}  // namespace

std::string Utf8Pieces::add(std::string_view bytes) {
  std::string text;
  for (const char letter : bytes) {
    const auto byte = static_cast<unsigned char>(letter);
    if (!held_.empty() && !continues(static_cast<unsigned char>(held_[0]), held_.size(), byte)) {
      text += kReplacement;
      held_.clear();
    }
    const std::size_t length =
        length_of(held_.empty() ? byte : static_cast<unsigned char>(held_[0]));
    if (length == 0) {
      text += kReplacement;
      continue;
    }
    held_ += letter;
    if (held_.size() == length) text += std::exchange(held_, {});
  }
  return text;
}

std::string Utf8Pieces::finish() {
  const bool cut = !std::exchange(held_, {}).empty();
  return cut ? kReplacement : "";
}

bool is_utf8(std::string_view bytes) {
  Utf8Pieces pieces;
  return pieces.add(bytes) + pieces.finish() == bytes;
}

TokenDecoder::TokenDecoder(TokenizerFile file, SpecialTokens special)
    : file_(std::move(file)), special_(special) {
  std::size_t joins = file_.steps.size();  // the first step that joins
  for (std::size_t i = file_.steps.size(); i-- > 0;) {
    const Kind kind = file_.steps[i].kind;
    if (kind == Kind::kByteLevel || kind == Kind::kFuse) joins = i;
  }
  steps_ = std::make_unique<Output>(out_);
  for (std::size_t i = file_.steps.size(); i-- > 0;) {
    steps_ = make_step(file_.steps[i], i > joins, std::move(steps_));
  }
}

TokenDecoder::~TokenDecoder() = default;

std::string TokenDecoder::add(int id) {
  const auto found = file_.tokens.find(id);
  if (found == file_.tokens.end()) return "";
  if (found->second.special && special_ == SpecialTokens::kSkip) return "";
  steps_->add(found->second.text);
  return std::exchange(out_, {});
}

std::string TokenDecoder::finish() {
  steps_->finish();
  return std::exchange(out_, {});
}

}  // namespace sluice
